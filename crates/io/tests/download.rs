//! Downloads whose process is killed at a random moment.

#[path = "../../remote/tests/server/mod.rs"]
#[allow(dead_code, reason = "other tests ask it for more")]
mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ingot_io::{DownloadOptions, RemoteOptions, SaveOptions, Unwatched, download};
use server::{Answer, Server};

/// The size of the file: several parts, of which the last one is short.
const NBYTES: usize = (12 << 20) + 3;

/// The versions that alternate. Each is a letter, of which its bytes and its URL consist.
const VERSIONS: [u8; 2] = [b'a', b'b'];

fn server() -> Server {
    let versions = VERSIONS.map(|letter| Arc::new(vec![letter; NBYTES]));
    Server::new(move |request| {
        let number = usize::from(request.path.ends_with('b'));
        Answer::part(&versions[number], request).with("ETag", &format!("\"{number}\""))
    })
}

fn fetch(url: &str, path: &Path) {
    let how = DownloadOptions::new().save(SaveOptions::new().durable(false));
    download(url, path, &RemoteOptions::default(), &how, &Unwatched).unwrap();
}

/// The program of the child process of the test below. Without its environment variable it does nothing.
#[test]
fn child() {
    let Ok(url) = std::env::var("INGOT_DOWNLOAD_URL") else {
        return;
    };
    let path = PathBuf::from(std::env::var_os("INGOT_DOWNLOAD_PATH").unwrap());
    for letter in VERSIONS.into_iter().cycle() {
        fetch(&format!("{url}/{}", char::from(letter)), &path);
    }
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    names
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn a_killed_download_leaves_a_whole_file_and_the_next_one_cleans_up() {
    let rounds = std::env::var("INGOT_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let server = server();
    let mut broken_off = 0;
    for round in 0..rounds {
        let asked = server.asked().len();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["download::child", "--exact", "--nocapture", "--test-threads=1"])
            .env("INGOT_DOWNLOAD_URL", server.at(""))
            .env("INGOT_DOWNLOAD_PATH", &path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // A generous limit, since a busy machine takes long to start a program.
        while server.asked().len() == asked {
            assert!(
                child.try_wait().unwrap().is_none(),
                "it fetches until it is killed"
            );
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(7 * (round % 30)));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success(), "it was killed");
        if path.exists() {
            let found = fs::read(&path).unwrap();
            assert!(
                VERSIONS.iter().any(|&letter| found == vec![letter; NBYTES]),
                "{} bytes after a kill",
                found.len()
            );
        }
        broken_off += u64::from(names(folder.path()).iter().any(|name| name != "file"));
        let letter = VERSIONS[usize::from(round % 2 == 0)];
        fetch(&server.at(&format!("/{}", char::from(letter))), &path);
        assert!(fs::read(&path).unwrap() == vec![letter; NBYTES]);
        assert_eq!(names(folder.path()), ["file"], "round {round}");
    }
    eprintln!("{rounds} kills: {broken_off} left the begin of a file");
    assert!(broken_off > 0, "none of {rounds} was killed under way");
}
