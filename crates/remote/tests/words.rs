//! Functions that make no request: URLs, faults, secrets and flags.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_remote::{
    Fault, Location, RemoteOptions, Secret, StopFlag, Token, is_folder, is_url, local_path, redacted,
    url_file_name, was_url,
};

#[test]
fn urls_are_distinguished_from_paths() {
    assert!(is_url("s3://b/k") && is_url("file:/a") && !is_url("a/b") && !is_url("C:/a"));
    assert!(was_url("https:/h/x") && !was_url("h/x"));
    assert_eq!(
        local_path("file:///a%20b").unwrap().unwrap(),
        PathBuf::from("/a b")
    );
    assert_eq!(local_path("file://h/a").unwrap().unwrap_err().code(), "bad-url");
    assert!(local_path("/a").is_none());
}

#[test]
fn urls_name_files_and_folders() {
    assert_eq!(url_file_name("https://h/a/x%20y.bt?sig=1"), "x y.bt");
    assert_eq!(url_file_name("hf://me/gpt"), "model.safetensors");
    assert!(is_folder("hf://me/gpt") && is_folder("https://huggingface.co/me/gpt"));
    assert!(!is_folder("hf://me/gpt/x.bt") && !is_folder("s3://b/k"));
    assert!(is_folder("s3://b/k/") && is_folder("az://b/k/") && !is_folder("https://h/a/"));
    assert_eq!(url_file_name("gs://b/k/"), "model.safetensors");
}

#[test]
fn redacted_urls_hide_secrets() {
    assert_eq!(redacted("https://me:hunter2@h/x?sig=hunter3"), "https://h/x?…");
    assert_eq!(redacted("s3://b/k?versionId=1"), "s3://b/k?versionId=1");
    assert_eq!(format!("{:?}", Secret::new("hunter2\n")), "…");
}

#[test]
fn locations_are_local_or_remote() {
    let find = |url: &str, options: &RemoteOptions| Location::find(url, options, StopFlag::never());
    let mut options = RemoteOptions::default();
    let found = find("file:///a", &options).unwrap();
    assert!(matches!(found, Location::Cached(path, None) if path == Path::new("/a")));
    assert!(matches!(
        find("https://h/x", &options).unwrap(),
        Location::Remote(_)
    ));
    assert_eq!(find("ftp://h/x", &options).unwrap_err().code(), "bad-url");
    options.token = Token::Given(Secret::new("two\nlines"));
    let fault = find("https://h/x", &options).unwrap_err();
    assert!(fault.is_misuse() && fault.code() == "storage-option");
}

#[test]
fn io_errors_keep_the_code_of_a_fault() {
    for (fault, code) in [
        (Fault::option("why"), "storage-option"),
        (Fault::address("why"), "bad-url"),
        (Fault::too_large(7), "document-too-large"),
    ] {
        assert_eq!((fault.code(), fault.status(), fault.region()), (code, None, None));
        assert!(!fault.is_missing() && !fault.is_answer());
        let error = io::Error::from(fault);
        assert_eq!(Fault::of(&error).map(Fault::code), Some(code));
    }
    assert!(Fault::of(&io::Error::from(io::ErrorKind::NotFound)).is_none());
}

#[test]
fn stop_flags_can_be_set() {
    let flag = AtomicBool::new(false);
    assert!(!StopFlag::never().is_set() && !StopFlag::from(&flag).is_set());
    flag.store(true, Ordering::Relaxed);
    assert!(StopFlag::from(&flag).is_set());
}
