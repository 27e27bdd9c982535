//! Escapes names from files so that they are safe to print.

use core::fmt::{self, Write};

/// A name between backticks. Every character that could control a terminal or hide text is escaped, and the name is cut
/// after [`Quoted::CHARS`] characters. All messages print names through this type.
pub struct Quoted<'a>(pub &'a str);

impl Quoted<'_> {
    /// Characters of a name that are printed. Longer names exist (a header may hold one of 100 MB), but no message
    /// should contain one in full.
    pub const CHARS: usize = 200;
}

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('`')?;
        escape(f, self.0, Quoted::CHARS)?;
        f.write_char('`')
    }
}

/// Text such as a path, escaped like [`Quoted`] but neither quoted nor cut.
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(f, self.0, usize::MAX)
    }
}

fn escape(f: &mut fmt::Formatter<'_>, text: &str, limit: usize) -> fmt::Result {
    for (count, c) in text.chars().enumerate() {
        if count == limit {
            return f.write_char('…');
        }
        match c {
            '\0'..='\x1f' | '\x7f'..='\u{9f}' => write!(f, "\\x{:02x}", u32::from(c))?,
            _ if is_invisible(c) => write!(f, "\\u{:04x}", u32::from(c))?,
            _ => f.write_char(c)?,
        }
    }
    Ok(())
}

/// Characters that reorder, join or hide the text around them: zero-width and bidirectional controls, line and
/// paragraph separators, fillers, tags and variation selectors. These are all characters that Unicode calls default
/// ignorable.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
        | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// A shape from a header, shortened so that a hostile one cannot fill the screen.
pub(crate) struct Shape<'a>(pub(crate) &'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        f.write_str("[")?;
        for (axis, dim) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{dim}", if axis == 0 { "" } else { ", " })?;
        }
        match self.0.len().checked_sub(SHOWN) {
            None | Some(0) => f.write_str("]"),
            Some(more) => write!(f, ", … {more} more]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{format, string::ToString};

    #[test]
    fn escapes_terminal_controls() {
        assert_eq!(
            Quoted("a\x1b[31m\u{9b}\u{202e}b").to_string(),
            "`a\\x1b[31m\\x9b\\u202eb`"
        );
    }

    #[test]
    fn a_path_is_escaped_and_neither_quoted_nor_cut() {
        let long = "x".repeat(Quoted::CHARS + 1);
        assert_eq!(
            Escaped(&format!("{long}\x1b")).to_string(),
            format!("{long}\\x1b")
        );
    }

    #[test]
    fn cuts_long_names() {
        let long = "x".repeat(60_000);
        assert_eq!(
            Quoted(&long).to_string(),
            format!("`{}…`", "x".repeat(Quoted::CHARS))
        );
    }
}
