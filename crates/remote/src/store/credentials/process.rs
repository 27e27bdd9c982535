//! Programs that print keys.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::refused;
use crate::fault::{Fault, FaultKind};
use crate::http::pace::Deadline;
use crate::options::Secret;
use crate::system::{BACKSLASH_ESCAPES, without_waiting};

/// How often it is looked whether a program has ended.
const LOOK: Duration = Duration::from_millis(10);

/// Bytes of what it prints that are read: what fits into a pipe while nobody reads it.
const OUTPUT_NBYTES: u64 = 64 << 10;

/// What a program prints that is not run by a shell. It has the time of the request that needs its keys, and is ended with the call.
pub(super) fn run(command: &Secret, deadline: Deadline<'_>) -> Result<String, Fault> {
    let words = split(command.reveal()).ok_or_else(|| refused("it has a quote that is not closed"))?;
    let [program, arguments @ ..] = &words[..] else {
        return Err(refused("it names no program"));
    };
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|fault| refused(format!("the program cannot be run: {fault}")))?;
    let ended = wait(&mut child, deadline);
    if ended.is_err() {
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
    ended?;
    let mut output = Vec::new();
    if let Some(pipe) = child.stdout.take() {
        // What it has started may go on and keep the pipe open.
        without_waiting(&pipe);
        // Without an end there may be all that it has printed.
        let _ = pipe.take(OUTPUT_NBYTES).read_to_end(&mut output);
    }
    String::from_utf8(output).map_err(|_| refused("the program prints what is no UTF-8"))
}

fn wait(child: &mut Child, deadline: Deadline<'_>) -> Result<(), Fault> {
    let begun = std::time::Instant::now();
    loop {
        let ended = child.try_wait();
        match ended.map_err(|fault| refused(format!("the program cannot be waited for: {fault}")))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(refused(format!("the program failed: {status}"))),
            None if deadline.stop.is_set() => return Err(FaultKind::Stopped.into()),
            None if deadline.at <= std::time::Instant::now() => {
                let what = "the program did not end";
                return Err(FaultKind::Slow {
                    what,
                    after: begun.elapsed(),
                }
                .into());
            }
            None => thread::sleep(LOOK),
        }
    }
}

/// The words of a command as a shell of POSIX has them, which expands nothing. None: a quote is not closed.
fn split(command: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let (mut word, mut quote) = (None::<String>, None);
    let mut letters = command.chars().peekable();
    while let Some(letter) = letters.next() {
        let escapes = letter == '\\' && quote != Some('\'') && BACKSLASH_ESCAPES;
        match letter {
            _ if quote == Some(letter) => quote = None,
            _ if escapes
                && (quote.is_none() || letters.peek().is_some_and(|next| "\"\\".contains(*next))) =>
            {
                word.get_or_insert_default().push(letters.next()?);
            }
            _ if quote.is_some() => word.get_or_insert_default().push(letter),
            '\'' | '"' => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            _ if letter.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_words_that_a_shell_sees() {
        // Whatever has a backslash has other words on Windows.
        let is_same = |command: &str| BACKSLASH_ESCAPES || !command.contains('\\');
        for (command, words) in [
            ("a  b\tc", &["a", "b", "c"][..]),
            (
                r#"'/my tools/keys' --profile "a b""#,
                &["/my tools/keys", "--profile", "a b"],
            ),
            (r#"a "" '' x''y"#, &["a", "", "", "xy"]),
            (
                r#"a\ b \"c "d\"e\\f\g" '\h"'"#,
                &["a b", "\"c", r#"d"e\f\g"#, r#"\h""#],
            ),
            ("$HOME `x` ;", &["$HOME", "`x`", ";"]),
            ("", &[]),
        ] {
            if is_same(command) {
                assert_eq!(split(command).unwrap(), words, "{command}");
            }
        }
        for command in ["a 'b", "a \"b", "a\\"] {
            if is_same(command) {
                assert_eq!(split(command), None, "{command}");
            }
        }
    }
}
