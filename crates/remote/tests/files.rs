//! Remote files from a server on this machine, through the public API.

use std::fs;
use std::io::Read;
#[cfg(target_os = "linux")]
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ingot_remote::{
    Client, Fault, Location, Remote, RemoteFile, RemoteOptions, Resource, Secret, StopFlag, Token,
    shard_headers,
};

use crate::server::{Answer, Server};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn options() -> RemoteOptions {
    let mut options = RemoteOptions::default();
    options.retries = 1;
    options.timeout = Duration::from_secs(20);
    options
}

fn remote(url: &str, options: &RemoteOptions) -> Remote {
    match Location::find(url, options, StopFlag::never()).unwrap() {
        Location::Remote(remote) => *remote,
        Location::Cached(path, _) => panic!("{} is on this machine", path.display()),
    }
}

fn resource(url: &str, options: &RemoteOptions) -> Resource {
    Resource::new(&Arc::new(Client::new(options.clone())), &remote(url, options))
}

fn begin(url: &str, start_nbytes: u64) -> Result<RemoteFile, Fault> {
    RemoteFile::begin(resource(url, &options()), start_nbytes, StopFlag::never())
}

fn data(nbytes: usize) -> Vec<u8> {
    (0..nbytes).map(|at| (at * 7 % 251).try_into().unwrap()).collect()
}

fn bytes_of(mut reader: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn ranges_have_the_bytes_of_the_file() {
    let data = data(5000);
    let server = Server::of(data.clone());
    let file = begin(&server.at("/x"), 64).unwrap();
    assert_eq!((file.nbytes(), file.start()), (5000, &data[..64]));
    for (begin, end) in [
        (0, 0),
        (0, 10),
        (0, 64),
        (10, 100),
        (64, 65),
        (63, 5000),
        (4999, 5000),
    ] {
        let read = bytes_of(file.reader(begin..end, StopFlag::never()));
        let (begin, end) = (usize::try_from(begin).unwrap(), usize::try_from(end).unwrap());
        assert_eq!(read, &data[begin..end], "{begin}..{end}");
    }
    assert_eq!(bytes_of(file.all(StopFlag::never())), data);
    assert_eq!(file.nbytes_now(), Some(5000));
    assert!(!file.is_whole());
    assert!(file.version().unwrap().ends_with("etag \"v1\""));
    // One connection served all requests.
    assert_eq!(server.connections(), 1);
}

#[test]
fn the_start_can_be_extended_and_freed() {
    let data = data(5000);
    let server = Server::of(data.clone());
    let mut file = begin(&server.at("/x"), 64).unwrap();
    file.extend_start(32, StopFlag::never()).unwrap();
    assert_eq!(file.start(), &data[..64]);
    file.extend_start(1000, StopFlag::never()).unwrap();
    assert_eq!(file.start(), &data[..1000]);
    assert_eq!(server.asked()[1].range(), Some(64..1000));
    file.free_start();
    assert!(file.start().is_empty());
    assert_eq!(bytes_of(file.reader(0..5000, StopFlag::never())), data);
}

#[test]
fn an_empty_file_is_empty() {
    let server = Server::of(Vec::new());
    let file = begin(&server.at("/x"), 64).unwrap();
    assert_eq!((file.nbytes(), file.start()), (0, &b""[..]));
    assert!(bytes_of(file.all(StopFlag::never())).is_empty());
}

#[test]
fn servers_without_ranges_serve_small_files_and_whole_large_ones() {
    let data = data(9 << 20);
    let small = Server::new(|_| Answer::new(200, b"12345"));
    assert_eq!(begin(&small.at("/x"), 2).unwrap().start(), b"12345");
    let served = data.clone();
    let large = Server::new(move |_| Answer::new(200, &served));
    assert_eq!(begin(&large.at("/x"), 2).unwrap_err().code(), "range-ignored");
    for open in [RemoteFile::of_whole, RemoteFile::of_many] {
        let file = open(resource(&large.at("/x"), &options()), StopFlag::never()).unwrap();
        assert!(file.is_whole());
        assert_eq!(bytes_of(file.all(StopFlag::never())), data);
    }
}

#[test]
fn a_replaced_file_is_not_mixed_with_the_new_one() {
    let data = data(500);
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let server = Server::new(move |request| {
        let is_first = asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        let nbytes = if is_first { 500 } else { 400 };
        Answer::part(&data[..nbytes], request).with("ETag", if is_first { "\"v1\"" } else { "\"v2\"" })
    });
    let file = begin(&server.at("/x"), 10).unwrap();
    let mut rest = Vec::new();
    let fault = file
        .reader(10..20, StopFlag::never())
        .read_to_end(&mut rest)
        .unwrap_err();
    assert_eq!(Fault::of(&fault).unwrap().code(), "changed");
    assert_eq!(file.nbytes_now(), Some(400));
    assert_eq!(server.asked()[1].header("if-match"), Some("\"v1\""));
}

#[test]
fn temporary_failures_are_retried() {
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let server = Server::new(
        move |request| match asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => Answer::new(503, b""),
            _ => Answer::part(b"12345", request),
        },
    );
    assert_eq!(begin(&server.at("/x"), 5).unwrap().start(), b"12345");
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn refusals_quote_the_server_without_secrets() {
    let server = Server::new(|request| {
        let sent = request.header("authorization").unwrap_or_default().to_owned();
        Answer::new(404, b"").with("X-Error-Message", &format!("no file for {sent}"))
    });
    let mut options = options();
    options.token = Token::Given(Secret::new("hunter2-secret"));
    let asked = resource(&server.at("/x?sig=hunter3-secret"), &options);
    let fault = RemoteFile::begin(asked, 8, StopFlag::never()).unwrap_err();
    assert_eq!((fault.code(), fault.status()), ("http-status", Some(404)));
    assert!(fault.is_missing() && fault.is_answer() && !fault.is_misuse());
    assert_eq!(
        server.asked()[0].header("authorization"),
        Some("Bearer hunter2-secret")
    );
    let text = fault.and_not("index.json").to_string();
    assert!(
        text.contains("no file for …; nor is there a file index.json"),
        "{text}"
    );
    assert!(!text.contains("hunter"), "{text}");
}

#[test]
fn refusals_name_the_region_of_a_bucket() {
    let server = Server::new(|_| Answer::new(400, b"").with("x-amz-bucket-region", "eu-west-3"));
    let mut options = options();
    options.endpoint = Some(server.url.clone());
    options.anonymous = true;
    let asked = resource("s3://bucket/a key", &options);
    let fault = RemoteFile::begin(asked, 8, StopFlag::never()).unwrap_err();
    assert_eq!(fault.region(), Some("eu-west-3"));
    assert_eq!(server.asked()[0].path, "/bucket/a%20key");
}

#[test]
fn each_store_has_its_own_paths() {
    let server = Server::of(b"12345".to_vec());
    let mut options = options();
    options.endpoint = Some(server.url.clone());
    options.account = Some("me".to_owned());
    options.anonymous = true;
    options.token = Token::Withheld;
    for (url, path) in [
        ("s3://b/a/../k", "/b/a/../k"),
        ("gs://b/k k", "/b/k%20k"),
        ("az://c/k", "/c/k"),
        ("hf://me/gpt@v1/x.bt", "/me/gpt/resolve/v1/x.bt"),
    ] {
        let file = RemoteFile::begin(resource(url, &options), 5, StopFlag::never()).unwrap();
        assert_eq!(file.start(), b"12345", "{url}");
        assert_eq!(server.asked().last().unwrap().path, path);
        assert_eq!(server.asked().last().unwrap().header("authorization"), None);
    }
}

#[test]
fn documents_are_read_whole_or_rejected() {
    let server = Server::of(b"12345".to_vec());
    let file = resource(&server.at("/x"), &options());
    assert_eq!(file.document(5, StopFlag::never()).unwrap(), b"12345");
    let fault = file.document(4, StopFlag::never()).unwrap_err();
    assert_eq!(fault.code(), "document-too-large");
}

#[test]
fn the_hub_names_commit_and_tag_and_has_all_headers_in_one_document() {
    let server = Server::new(|request| match request.path.contains("/api/") {
        true => Answer::part(b"{}", request),
        false if request.path.ends_with("/model.safetensors") => Answer::new(404, b""),
        false => Answer::part(b"12345", request)
            .with("X-Repo-Commit", COMMIT)
            .with("X-Linked-ETag", "\"abc\""),
    });
    let mut options = options();
    options.endpoint = Some(server.url.clone());
    options.token = Token::Withheld;
    let file = RemoteFile::begin(resource("hf://me/gpt/x.bt", &options), 5, StopFlag::never()).unwrap();
    assert_eq!(file.commit().as_deref(), Some(COMMIT));
    assert_eq!(file.linked_etag().as_deref(), Some("\"abc\""));
    let headers = |url: &str| shard_headers(url, &options, 100, StopFlag::never());
    assert_eq!(headers("hf://me/gpt").as_deref(), Some(&b"{}"[..]));
    assert_eq!(headers("hf://me/gpt@v1"), None);
    assert_eq!(headers("s3://b/k"), None);
}

#[test]
fn files_beside_a_file_have_its_host_and_folder() {
    let options = options();
    for (url, beside) in [
        ("https://h/a/index.json?sig=secret", "https://h/a/x y.bt"),
        ("s3://b/a/index.json", "s3://b/a/x y.bt"),
        ("hf://me/gpt@v1/a/index.json", "hf://me/gpt@v1/a/x y.bt"),
    ] {
        let index = remote(url, &options);
        assert!(index.is_index() && !index.is_folder());
        let file = index.beside("x y.bt", &options).unwrap();
        assert!(!file.is_index() && file.path().ends_with("/x%20y.bt"));
        let shown = file.shown.replace("%20", " ").replace("?…", "");
        assert_eq!(shown, beside);
        assert_eq!(file.backend, index.backend);
    }
    let folder = remote("s3://b/a b/", &options);
    assert!(folder.is_folder() && !folder.is_of_hub());
    assert_eq!(folder.beside("x.bt", &options).unwrap().shown, "s3://b/a b/x.bt");
    let folder = remote("hf://me/gpt", &options);
    assert!(folder.is_folder() && folder.is_of_hub());
    let file = folder
        .at(Some(COMMIT.to_owned()))
        .beside("x.bt", &options)
        .unwrap();
    assert_eq!(file.shown, format!("hf://me/gpt@{COMMIT}/x.bt"));
    assert_eq!((file.cached(), file.cached_at(None)), (None, None));
}

/// Runs itself with another environment, since a process has one.
#[test]
fn commits_are_found_in_the_cache_of_the_hub() {
    const NAME: &str = "commits_are_found_in_the_cache_of_the_hub";
    if std::env::var_os("HF_HUB_CACHE").is_none() {
        let cache = tempfile::tempdir().unwrap();
        let snapshot = cache.path().join("models--me--gpt/snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(snapshot.join("x.bt"), "x").unwrap();
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", NAME]).env("HF_HUB_CACHE", cache.path());
        assert!(again.output().unwrap().status.success());
        return;
    }
    let options = options();
    let file = remote("hf://me/gpt/x.bt", &options);
    assert_eq!(file.cached(), None);
    assert!(file.cached_at(Some(COMMIT)).unwrap().ends_with("x.bt"));
    assert!(file.at(Some(COMMIT.to_owned())).cached().is_some());
    let url = format!("hf://me/gpt@{COMMIT}/x.bt");
    let found = Location::find(&url, &options, StopFlag::never()).unwrap();
    assert!(matches!(found, Location::Cached(_, Some(_))));
}

#[test]
fn close_idle_keeps_some_connections() {
    let server = Server::of(data(100));
    let client = Arc::new(Client::new(options()));
    assert_eq!(client.options().retries, 1);
    let read = || {
        let file = Resource::new(&client, &remote(&server.at("/x"), client.options()));
        file.document(100, StopFlag::never()).unwrap()
    };
    assert_eq!(read(), read());
    assert_eq!(server.connections(), 1);
    client.close_idle(1);
    read();
    assert_eq!(server.connections(), 1);
    client.close_idle(0);
    read();
    assert_eq!(server.connections(), 2);
}

#[test]
fn a_set_stop_flag_prevents_requests() {
    let server = Server::of(data(100));
    let stopped = AtomicBool::new(true);
    let stop = StopFlag::from(&stopped);
    let fault = RemoteFile::begin(resource(&server.at("/x"), &options()), 8, stop).unwrap_err();
    assert_eq!(fault.code(), "interrupted");
}

/// Return the names of the threads of this process.
#[cfg(target_os = "linux")]
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map_while(Result::ok);
    tasks
        .map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default())
        .collect()
}

/// Return the fault of a request that is stopped while it waits.
#[cfg(target_os = "linux")]
fn interrupted(url: &str) -> Fault {
    let mut options = options();
    options.retries = 0;
    let asked = resource(url, &options);
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = StopFlag::from(&stopped);
        let asking = scope.spawn(move || RemoteFile::begin(asked, 8, stop).unwrap_err());
        std::thread::sleep(Duration::from_millis(300));
        stopped.store(true, std::sync::atomic::Ordering::Relaxed);
        asking.join().unwrap()
    })
}

#[cfg(target_os = "linux")]
#[test]
fn connecting_can_be_stopped_and_leaves_no_thread() {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};

    // The queue has room for one connection, which is never accepted. The next one times out.
    let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listen(&listener, 0).unwrap();
    let at = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
    let _in_the_way = TcpStream::connect(at).unwrap();
    let full = TcpStream::connect_timeout(&at, Duration::from_millis(200)).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::TimedOut);

    let begun = std::time::Instant::now();
    let fault = interrupted(&format!("http://{at}/x"));
    assert_eq!(fault.code(), "interrupted", "{fault}");
    assert!(begun.elapsed() < Duration::from_secs(5));

    // Resolving a name takes a thread, which is joined.
    let server = Server::of(data(100));
    let url = server.at("/x").replace("127.0.0.1", "localhost");
    begin(&url, 8).unwrap();
    // The system may list a thread for a moment after it was joined.
    let begun = std::time::Instant::now();
    let remain = || threads().iter().any(|name| name.starts_with("ingot"));
    while remain() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!remain(), "{:?}", threads());
}
