//! Tests of `ubtrfs send`, `send --diff` and `subvolume find-new`: a mount and its image give equal streams, Linux
//! receives the streams, and wrong arguments are refused.

use std::ffi::OsStr;
use std::fs;

use tempfile::TempDir;
use ubtrfs_testkit::{Compare, Image, LoopMount, Rng, capability, compare_trees, run};

use crate::common::{ok, refused, ubtrfs};

/// Makes an image with two snapshots, `s0` and `s1`, of the subvolume `live`.
fn image() -> Image {
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    let btrfs = |args: &[&str]| {
        run("btrfs", args.iter().map(|arg| arg.replace("AT", &mount.path().display().to_string()))).unwrap()
    };
    btrfs(&["subvolume", "create", "AT/live"]);
    fs::create_dir(mount.join("live/dir")).unwrap();
    fs::write(mount.join("live/dir/file"), Rng::new(1).bytes(500_000)).unwrap();
    fs::write(mount.join("live/gone"), "gone").unwrap();
    btrfs(&["subvolume", "snapshot", "-r", "AT/live", "AT/s0"]);
    fs::rename(mount.join("live/dir"), mount.join("live/moved")).unwrap();
    fs::remove_file(mount.join("live/gone")).unwrap();
    fs::write(mount.join("live/new"), "new").unwrap();
    let file = fs::File::options().write(true).open(mount.join("live/moved/file")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 8192).unwrap();
    drop(file);
    btrfs(&["subvolume", "snapshot", "-r", "AT/live", "AT/s1"]);
    mount.close().unwrap();
    image
}

#[test]
fn a_mount_and_its_image_send_equal_streams_that_linux_receives() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let dir = TempDir::with_prefix("ubtrfs-send-").unwrap();
    let stream = |name: &str| dir.path().join(name).display().to_string();
    let inside = |name: &str| format!("{}:/{name}", image.path().display());
    ok(ubtrfs(["send", "-q", "-f", &stream("full"), &inside("s0")]));
    ok(ubtrfs(["send", "-q", "-f", &stream("more"), "-p", &inside("s0"), &inside("s1")]));
    let changes = ok(ubtrfs(["send", "--diff", &inside("s0"), &inside("s1")]));
    for line in [
        "renamed  directory dir -> moved",
        "changed  file      moved/file (8192+4096)",
        "added    file      new",
        "removed  file      gone",
    ] {
        assert!(changes.lines().any(|found| found == line), "{line}: {changes}");
    }
    let found = ok(ubtrfs(["subvolume", "find-new", &inside("s1"), "0"]));

    let point = TempDir::with_prefix("ubtrfs-send-mount-").unwrap();
    let at = |name: &str| point.path().join(name).display().to_string();
    ok(ubtrfs([OsStr::new("mount"), image.path().as_os_str(), point.path().as_os_str()]));
    let sent = ubtrfs(["send", "-q", &at("s0")]);
    let more = ubtrfs(["send", "-q", "-p", &at("s0"), &at("s1")]);
    let (same, mounted) =
        (ubtrfs(["send", "--diff", &at("s0"), &at("s1")]), ubtrfs(["subvolume", "find-new", &at("s1"), "0"]));
    let refusals = [
        ubtrfs(["send", "-q", &at("live")]),
        ubtrfs(["send", "-q", "-c", &at("s1"), &at("s1")]),
        ubtrfs(["send", "-q", &at("nosuch")]),
    ];
    ok(ubtrfs([OsStr::new("umount"), point.path().as_os_str()]));
    assert!(sent.stdout == fs::read(stream("full")).unwrap(), "{}", String::from_utf8_lossy(&sent.stderr));
    assert!(more.stdout == fs::read(stream("more")).unwrap(), "{}", String::from_utf8_lossy(&more.stderr));
    assert_eq!(ok(same), changes);
    assert_eq!(ok(mounted), found);
    refused(&refusals[0], &["not read-only", "snapshot -r"]);
    refused(&refusals[1], &["-p", "UUID"]);
    refused(&refusals[2], &["nosuch"]);

    let (from, target) = (LoopMount::new(image.path(), "").unwrap(), Image::kernel_made(512 << 20, &[]).unwrap());
    let linux =
        run("btrfs", ["subvolume".into(), "find-new".into(), from.join("s1").into_os_string(), "0".into()]).unwrap();
    assert_eq!(linux, found);
    let to = LoopMount::new(target.path(), "").unwrap();
    for (file, name) in [("full", "s0"), ("more", "s1")] {
        run("btrfs", ["receive".into(), "-f".into(), stream(file).into(), to.path().as_os_str().to_owned()]).unwrap();
        compare_trees(&from.join(name), &to.join(name), Compare::ALL).unwrap();
    }
    from.close().unwrap();
    to.close().unwrap();
}

#[test]
fn a_refused_send_leaves_the_file_as_it_is() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = image();
    let dir = TempDir::with_prefix("ubtrfs-send-").unwrap();
    let file = dir.path().join("stream");
    let inside = format!("{}:/s0", image.path().display());
    let send = |args: &[&str]| ubtrfs(["send", "-q", "-f", file.to_str().unwrap()].iter().chain(args));
    fs::write(&file, vec![7; 4 << 20]).unwrap();
    // A snapshot cannot be its own parent. Only the engine detects this, after the output file was opened. The output
    // file keeps its content.
    refused(&send(&["-c", &inside, &inside]), &["none of the clone sources"]);
    assert_eq!(fs::read(&file).unwrap(), vec![7; 4 << 20]);
    // The file's old content is longer than the stream, and is replaced completely.
    ok(send(&[&inside]));
    let stream = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    ok(send(&[&inside]));
    assert!(stream.starts_with(b"btrfs-stream\0") && stream == fs::read(&file).unwrap());
}

#[test]
fn a_stream_that_nobody_gets_is_told_as_by_other_commands() {
    let dir = TempDir::with_prefix("ubtrfs-send-").unwrap();
    let image = dir.path().join("a.img").display().to_string();
    ok(ubtrfs(["mkfs", "-q", "-b", "200M", &image]));
    let inside = format!("{image}:/r");
    ok(ubtrfs(["subvolume", "create", &inside]));
    fs::write(dir.path().join("big"), Rng::new(1).bytes(4 << 20)).unwrap();
    ok(ubtrfs(["cp", &dir.path().join("big").display().to_string(), &format!("{inside}/big")]));
    ok(ubtrfs(["subvolume", "set-read-only", &inside, "true"]));
    let shell = |script: &str| {
        let script = script.replace("SEND", &format!("{} send -q {inside}", env!("CARGO_BIN_EXE_ubtrfs")));
        std::process::Command::new("bash").args(["-c", &script]).output().unwrap()
    };
    refused(&shell("SEND >&-"), &["cannot write to standard output: it is closed"]);
    let gone = shell("SEND | true; exit ${PIPESTATUS[0]}");
    assert_eq!((gone.status.code(), gone.stderr.is_empty()), (Some(141), true), "{gone:?}");
    ok(ubtrfs(["send", "-q", "-f", &dir.path().join("stream").display().to_string(), &inside]));
}
