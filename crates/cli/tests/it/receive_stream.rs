//! Tests of `ubtrfs receive` on images and on mounts, with streams that Linux sends.
//!
//! Method: Linux makes and sends snapshots, the built program receives them, and Linux reads, checks, shows and sends
//! the result.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, SendOptions, SnapshotChain, btrfs_check, capability, run as sh};

use crate::common::{command, ok, refused, server_of, text, ubtrfs};

/// A seed whose streams are large.
const SEED: u64 = 6;

/// A mount, unmounted on drop.
struct Mount(TempDir);

impl Mount {
    fn new(image: &Image) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-receive-").unwrap();
        ok(ubtrfs(["mount", &text(image.path()), &text(dir.path())]));
        Self(dir)
    }

    fn close(self) {
        ok(ubtrfs(["umount", &text(self.0.path())]));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = ubtrfs(["umount", "-l", &text(self.0.path())]);
    }
}

/// Two snapshots of an ordinary filesystem, and their streams.
fn chain() -> (SnapshotChain, [tempfile::NamedTempFile; 2]) {
    let chain = SnapshotChain::make(SEED, 2, 300).unwrap();
    let full = chain.send(0, &SendOptions { proto: 1, ..SendOptions::default() }).unwrap();
    let how = SendOptions { proto: 2, compressed_data: true, parent: Some(0), ..SendOptions::default() };
    let incremental = chain.send(1, &how).unwrap();
    (chain, [full, incremental])
}

/// The lines of `btrfs subvolume show` that depend only on the stream.
fn shown(subvolume: &Path) -> Vec<String> {
    let text = sh("btrfs", ["subvolume", "show", &text(subvolume)]).unwrap();
    let wanted = ["Name:", "Received UUID:", "Flags:", "Send transid:"];
    text.lines()
        .map(str::trim)
        .filter(|line| wanted.iter().any(|word| line.starts_with(word)))
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_mount_and_an_image_receive_what_linux_receives() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let (chain, streams) = chain();
    let by_linux = Image::kernel_made(1 << 30, &[]).unwrap();
    let linux = LoopMount::new(by_linux.path(), "").unwrap();
    for stream in &streams {
        ubtrfs_testkit::receive_by_linux(stream.path(), linux.path()).unwrap();
    }
    chain.compare(linux.path()).expect("Linux receives what it sends");
    for is_mount in [false, true] {
        let image = Image::kernel_made(1 << 30, &[]).unwrap();
        let mount = is_mount.then(|| Mount::new(&image));
        let place = mount.as_ref().map_or(text(image.path()), |mount| text(mount.0.path()));
        // Receive the first stream from a file, and the second one from a pipe.
        let first = ubtrfs(["receive", "-f", &text(streams[0].path()), &place]);
        assert_eq!((String::from_utf8_lossy(&first.stderr), first.status.code()), ("At subvol s0\n".into(), Some(0)));
        let mut pipe = Command::new("cat").arg(streams[1].path()).stdout(Stdio::piped()).spawn().unwrap();
        let second = command(["receive", "-q", &place]).stdin(pipe.stdout.take().unwrap()).output().unwrap();
        ok(second);
        pipe.wait().unwrap();
        if let Some(mount) = mount {
            chain.compare(mount.0.path()).unwrap();
            mount.close();
        }
        btrfs_check(image.path()).unwrap();
        let found = LoopMount::new(image.path(), "").unwrap();
        chain.compare(found.path()).unwrap();
        chain.sharing(found.path()).unwrap().check(&chain.sharing(linux.path()).unwrap()).unwrap();
        for name in ["s0", "s1"] {
            assert_eq!(shown(&found.join(name)), shown(&linux.join(name)));
        }
        found.close().unwrap();
    }
    linux.close().unwrap();
}

#[test]
fn a_dump_is_that_of_btrfs_progs() {
    if !capability::kernel_oracle() {
        return;
    }
    let (_chain, streams) = chain();
    for stream in &streams {
        let ours = ok(ubtrfs(["receive", "--dump", "-f", &text(stream.path())]));
        let theirs = sh("btrfs", ["receive", "--dump", "-f", &text(stream.path())]).unwrap();
        // btrfs-progs prints the bytes of attributes raw, up to the first zero byte, so these lines are not compared.
        let kinds: Vec<&str> = ubtrfs_stream::CommandKind::ALL.iter().map(|kind| kind.name()).collect();
        let lines = |text: &str| -> Vec<String> {
            let kind_of =
                |line: &&str| line.split(' ').next().is_some_and(|kind| kind != "set_xattr" && kinds.contains(&kind));
            text.lines().filter(kind_of).map(str::to_owned).collect()
        };
        assert!(lines(&ours).len() > 100);
        assert_eq!(lines(&ours).len(), lines(&theirs).len());
        for (ours, theirs) in lines(&ours).iter().zip(lines(&theirs)) {
            assert_eq!(*ours, theirs);
        }
    }
}

#[test]
fn errors_are_one_line_that_says_what_to_do() {
    if !capability::kernel_oracle() {
        return;
    }
    let (_chain, [full, incremental]) = chain();
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let place = text(image.path());
    let receive = |stream: &Path| ubtrfs(["receive", "-f", &text(stream), &place]);
    refused(
        &receive(incremental.path()),
        &["command 1 (snapshot)", "the parent subvolume is not here", "receive the parent first"],
    );
    let scratch = TempDir::new().unwrap();
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = scratch.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let stream = fs::read(full.path()).unwrap();
    refused(&receive(&write("zeros", &[0; 100])), &["this is not a send stream"]);
    refused(&receive(&write("empty", b"")), &["the stream is empty"]);
    refused(&receive(&write("short", &stream[..5000])), &["the stream ends here", "bytes early"]);
    let mut damaged = stream.clone();
    damaged[4000] ^= 1;
    refused(&receive(&write("damaged", &damaged)), &["bad crc", "at byte"]);
    refused(&receive(&scratch.path().join("missing")), &["cannot open", "No such file"]);
    ok(ubtrfs(["receive", "-q", "-f", &text(full.path()), &place]));
    refused(&receive(full.path()), &["'s0' exists already"]);
    refused(&ubtrfs(["receive", "-f", &text(full.path()), &format!("{place}:/missing")]), &["cannot receive into"]);
    refused(&ubtrfs(["receive", "-f", &text(full.path())]), &["DIR"]);
    // Receive into a filesystem that is too small for the stream.
    let small = Image::kernel_made(110 << 20, &[]).unwrap();
    let big = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(big.path(), "").unwrap();
    sh(
        "sh",
        ["-c", "head -c 200M /dev/urandom > $0/big && btrfs subvolume snapshot -r $0 $0/snap", &text(mount.path())],
    )
    .unwrap();
    let large = scratch.path().join("large");
    sh("btrfs", ["send", "-q", "-f", &text(&large), &text(&mount.join("snap"))]).unwrap();
    refused(&ubtrfs(["receive", "-f", &text(&large), &text(small.path())]), &["(write)", "'big'", "no space left"]);
    assert_eq!(ok(ubtrfs(["ls", &format!("{}:/", text(small.path()))])), "");
    btrfs_check(small.path()).unwrap();
    btrfs_check(image.path()).unwrap();
    mount.close().unwrap();
}

/// Starts a receive into a mount or an image, with a pipe as standard input.
fn start(place: &str, options: &[&str]) -> Child {
    let mut command = command(["receive"].iter().chain(options).copied().chain([place]));
    command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the stream's subvolume appears in a mount.
fn wait_for(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_interrupted_receive_leaves_nothing_or_can_be_continued() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let (chain, [full, _]) = chain();
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = Mount::new(&image);
    let place = text(mount.0.path());
    let stream = fs::read(full.path()).unwrap();
    let half = stream.len() / 2;
    for (options, signal) in [(&[][..], Signal::INT), (&["--keep"][..], Signal::INT), (&["--keep"][..], Signal::KILL)] {
        let mut child = start(&place, options);
        let mut input = child.stdin.take().unwrap();
        // Commands are applied in batches: a small batch is applied when the next bytes come after some time.
        input.write_all(&stream[..half / 2]).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        input.write_all(&stream[half / 2..half]).unwrap();
        wait_for(&mount.0.path().join("s0"));
        std::thread::sleep(Duration::from_millis(300));
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait().unwrap();
        drop(input);
        let began = Instant::now();
        if options.is_empty() {
            while mount.0.path().join("s0").exists() {
                assert!(began.elapsed() < Duration::from_secs(10), "the subvolume stays");
                std::thread::sleep(Duration::from_millis(10));
            }
            continue;
        }
        // The server takes a moment to notice that the client went away, so wait for the mark.
        let list = || ok(ubtrfs(["subvolume", "list", "--json", &place]));
        let mark =
            || sh("getfattr", ["--only-values", "-n", "trusted.ubtrfs.incomplete", &text(&mount.0.path().join("s0"))]);
        while !mark().is_ok_and(|mark| mark.starts_with("stopped commands=")) {
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", mark());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(list().contains("\"received_uuid\": null"), "{}", list());
        refused(&ubtrfs(["receive", "-f", &text(full.path()), &place]), &["continue it with receive --keep"]);
        let done = ok(ubtrfs(["receive", "--keep", "--json", "-f", &text(full.path()), &place]));
        assert!(!done.contains("\"resumed_commands\":0"), "{done}");
        chain.compare_one(0, mount.0.path()).unwrap();
        ok(ubtrfs(["subvolume", "delete", &text(&mount.0.path().join("s0"))]));
    }
    mount.close();
    btrfs_check(image.path()).unwrap();
}

/// Kills receives, or the servers of the mounts that receive, at random points. `UBTRFS_KILLS` sets the number of
/// rounds, and `UBTRFS_SEED` the seed of the first round.
fn kill_receives(into_mount: bool) {
    let (chain, [full, _]) = chain();
    let stream = fs::read(full.path()).unwrap();
    let rounds = std::env::var("UBTRFS_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let seed = Rng::seed_or(1);
    for round in seed..seed + rounds {
        let mut rng = Rng::new(round);
        println!("round {round}");
        let image = Image::kernel_made(1 << 30, &[]).unwrap();
        let place = text(image.path());
        // With short commits, some of the subvolume is on disk.
        let options = if rng.one_in(2) { "commit=1" } else { "commit=30" };
        let dir = TempDir::with_prefix("ubtrfs-receive-").unwrap();
        let mount = into_mount.then(|| {
            ok(ubtrfs(["mount", "-o", options, &place, &text(dir.path())]));
            Mount(dir)
        });
        let mut child = match &mount {
            Some(mount) => start(&text(mount.0.path()), &["--keep"]),
            None => start(&place, &["--keep", "-o", options]),
        };
        let mut input = child.stdin.take().unwrap();
        input.write_all(&stream[..rng.index(stream.len())]).unwrap();
        std::thread::sleep(Duration::from_millis(rng.below(2500)));
        let killed = match &mount {
            Some(mount) => server_of(mount.0.path()),
            None => child.id(),
        };
        kill_process(Pid::from_raw(killed.cast_signed()).unwrap(), Signal::KILL).unwrap();
        assert!(!child.wait().unwrap().success());
        drop(mount);
        btrfs_check(image.path()).unwrap();
        let linux = LoopMount::new(image.path(), "").unwrap();
        if linux.join("s0").exists() {
            let shown = shown(&linux.join("s0"));
            assert!(shown.iter().any(|line| line.starts_with("Received UUID") && line.ends_with('-')), "{shown:?}");
            assert!(shown.iter().any(|line| line.starts_with("Send transid") && !line.ends_with(" 0")), "{shown:?}");
            assert!(shown.iter().any(|line| line.starts_with("Flags") && !line.contains("readonly")), "{shown:?}");
        }
        linux.close().unwrap();
        if ok(ubtrfs(["ls", &format!("{place}:/")])).contains("s0") {
            refused(&ubtrfs(["receive", "--keep", "-f", &text(full.path()), &place]), &["delete it first"]);
            ok(ubtrfs(["subvolume", "delete", &format!("{place}:/s0")]));
        }
        ok(ubtrfs(["receive", "-q", "-f", &text(full.path()), &place]));
        btrfs_check(image.path()).unwrap();
        let linux = LoopMount::new(image.path(), "").unwrap();
        chain.compare_one(0, linux.path()).unwrap();
        linux.close().unwrap();
    }
}

#[test]
fn a_killed_receive_into_an_image_is_marked_and_clean() {
    if capability::kernel_oracle() {
        kill_receives(false);
    }
}

#[test]
fn a_receive_whose_server_is_killed_is_marked_and_clean() {
    if capability::kernel_oracle() && capability::fuse() {
        kill_receives(true);
    }
}

#[test]
fn the_kernel_forgets_what_it_saw_during_a_receive() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let (chain, [full, _]) = chain();
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = Mount::new(&image);
    let stream = fs::read(full.path()).unwrap();
    let mut child = start(&text(mount.0.path()), &["-q"]);
    let mut input = child.stdin.take().unwrap();
    for part in stream.chunks(stream.len() / 10) {
        input.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        // Names, attributes and content go into the kernel's caches.
        let _ = ubtrfs_testkit::walk_path(&mount.0.path().join("s0"));
    }
    drop(input);
    ok(child.wait_with_output().unwrap());
    chain.compare_one(0, mount.0.path()).unwrap();
    mount.close();
}

#[test]
fn the_rest_of_the_input_is_left_after_the_first_end() {
    if !capability::kernel_oracle() {
        return;
    }
    let (_chain, [full, incremental]) = chain();
    let both = [fs::read(full.path()).unwrap(), fs::read(incremental.path()).unwrap()].concat();
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("both");
    File::create(&path).unwrap().write_all(&both).unwrap();
    for (option, expected) in [("-e", "s0\n"), ("-C", "s0\ns1\n")] {
        let image = Image::kernel_made(1 << 30, &[]).unwrap();
        ok(ubtrfs(["receive", "-q", option, "-f", &text(&path), &text(image.path())]));
        assert_eq!(ok(ubtrfs(["ls", &format!("{}:/", text(image.path()))])), expected);
    }
}
