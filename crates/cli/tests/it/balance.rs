//! Tests of `ubtrfs balance` on an image and on a mount: wrong arguments, and a damaged extent, which is
//! reported with its files.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run as sh, second_opinion};

use crate::common::{ok, refused, ubtrfs};

fn balance(args: &[&str], place: &str) -> Output {
    ubtrfs(["balance"].iter().chain(args).chain(&[place]))
}

fn filled() -> Image {
    filled_with(20 << 20)
}

/// An image with four files of this size.
fn filled_with(len_bytes: usize) -> Image {
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for number in 0..4 {
        std::fs::write(mount.join(format!("file-{number}")), vec![number; len_bytes]).unwrap();
    }
    mount.close().unwrap();
    image
}

/// An image with data, and a directory to mount it on.
struct Bed {
    image: Image,
    path: String,
    dir: tempfile::TempDir,
    /// The path of `dir`.
    at: String,
}

impl Bed {
    /// `None` if this machine cannot run the tests.
    fn new() -> Option<Self> {
        if !capability::kernel_oracle() || !capability::fuse() {
            return None;
        }
        let image = filled();
        let path = image.path().to_str().unwrap().to_owned();
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().to_str().unwrap().to_owned();
        Some(Self { image, path, dir, at })
    }
}

/// A send from the mount `at`. It waits, because nobody reads its stream, and a balance that empties block groups waits
/// for it.
fn waiting_send(at: &str) -> Child {
    let snapshot = format!("{at}/snapshot");
    ok(ubtrfs(["subvolume", "snapshot", "-r", at, &snapshot]));
    let mut send =
        crate::common::command(["send", &snapshot]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut begin = vec![0; 1 << 20];
    send.stdout.as_mut().unwrap().read_exact(&mut begin).unwrap();
    send
}

#[test]
fn an_image_and_a_mount_are_balanced_alike() {
    let Some(Bed { image, path, dir: _dir, at }) = Bed::new() else { return };
    for place in [&path, &at] {
        if *place == at {
            ok(ubtrfs(["mount", &path, &at]));
        }
        assert!(ok(balance(&["status"], place)).starts_with("No balance found"));
        for wrong in ["pause", "resume", "cancel"] {
            let output = balance(&[wrong], place);
            assert_eq!(output.status.code(), Some(2), "{wrong}: as btrfs-progs");
            assert!(String::from_utf8_lossy(&output.stderr).contains("balance"), "{wrong}");
        }
        assert!(ok(balance(&["start", "-dusage=0"], place)).starts_with("Done, had to relocate"));
        refused(&balance(&["start", "-mconvert=single"], place), &["force"]);
        refused(&balance(&["start", "-s"], place), &["--force"]);
        refused(&balance(&["start", "-ddevid=0"], place), &["number of a device"]);
        let too_small = ubtrfs(["filesystem", "resize", "1M", place]);
        refused(&too_small, &[&format!("cannot resize {place}: "), "give at least 32M"]);
        // Of two `-d` options, only the last one applies. With the limit 0, the command moves no block group, but
        // prints the total number of block groups.
        let none = ok(balance(&["start", "-dusage=50", "-dlimit=0"], place));
        assert!(none.starts_with("Done, had to relocate 0 out of ") && !none.contains("out of 0"), "{none}");
        ok(balance(&["start", "-f", "-mconvert=single,soft", "-dconvert=dup,soft"], place));
        let all = ok(balance(&["start", "-d", "-m", "-s", "-f"], place));
        assert!(all.starts_with("Done, had to relocate") && !all.contains(" 0 out of"), "{all}");
        ok(balance(&["start", "-dconvert=single,soft", "-mconvert=dup,soft"], place));
        if *place == at {
            ok(ubtrfs(["umount", &at]));
        }
        btrfs_check(image.path()).unwrap();
    }
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    let df = sh("btrfs", ["filesystem", "df", &mount.path().to_string_lossy()]).unwrap();
    assert!(df.contains("Data, single") && df.contains("Metadata, DUP") && df.contains("System, DUP"), "{df}");
    for number in 0..4 {
        assert!(std::fs::read(mount.join(format!("file-{number}"))).unwrap() == vec![number; 20 << 20]);
    }
    mount.close().unwrap();
}

/// Repeats `check` for up to 30 seconds, until it returns true.
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !check() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_balance_in_the_background_goes_on_after_the_command_and_can_be_waited_for() {
    let Some(Bed { image, path, dir: _dir, at }) = Bed::new() else { return };
    let is_idle = |place: &str| balance(&["status"], place).status.success();
    ok(ubtrfs(["mount", &path, &at]));
    assert_eq!(ok(balance(&["start", "--background", "-dconvert=dup"], &at)), "");
    // A second balance waits for the first one.
    assert!(ok(balance(&["start", "--enqueue", "-musage=0"], &at)).starts_with("Done"));
    eventually("the first balance ends", || is_idle(&at));
    let report = ok(ubtrfs(["filesystem", "df", &at]));
    assert!(report.contains("Data, DUP") && !report.contains("Data, single"), "{report}");
    let wrong = balance(&["start", "--bg", "-dconvert=raid1"], &at);
    refused(&wrong, &["single, dup or raid0"]);
    // A balance that has nothing to do succeeds.
    assert_eq!(ok(balance(&["start", "--bg", "-dusage=0"], &at)), "");
    let filters = ok(balance(&["start", "-v", "-dusage=0", "-mlimit=0"], &at));
    assert!(filters.starts_with("  DATA: usage=0..0\n  METADATA: limit=0..0\n  SYSTEM: limit=0..0\nDone"), "{filters}");
    assert_eq!(ok(balance(&["start", "-q", "-dusage=0"], &at)), "");
    ok(ubtrfs(["umount", &at]));
    assert_eq!(ok(balance(&["start", "--bg", "-dconvert=single"], &path)), "");
    eventually("the image is free again", || is_idle(&path));
    assert!(ok(ubtrfs(["filesystem", "df", &path])).contains("Data, single"));
    btrfs_check(image.path()).unwrap();
}

/// Runs a command as the user nobody.
fn as_nobody(args: &[&str]) -> Output {
    let mut command = std::process::Command::new(crate::common::NOBODY[0]);
    command.args(&crate::common::NOBODY[1..]).arg(env!("CARGO_BIN_EXE_ubtrfs")).args(args).output().unwrap()
}

#[test]
fn a_balance_of_an_image_in_the_background_is_shown_paused_and_cancelled() {
    if !capability::kernel_oracle() {
        return;
    }
    // Opening a locked image is tried for 0.2 seconds, and the balance has to take longer.
    let image = filled_with(80 << 20);
    let path = image.path().to_str().unwrap().to_owned();
    let state = || {
        let status = balance(&["status", "--json"], &path);
        let value: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        assert_eq!(status.status.code(), Some(i32::from(!value.is_null())), "{status:?}");
        value["state"].as_str().map(str::to_owned)
    };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    // A command may come too late for the running balance. So each command is tried with new balances until it was in
    // time.
    let mut profiles = ["dup", "single"].iter().cycle();
    let mut eventually_during = |what: &str, command: &mut dyn FnMut() -> bool| {
        for _ in 0..40 {
            let convert = format!("-dconvert={}", profiles.next().unwrap());
            assert_eq!(ok(balance(&["start", "--bg", &convert], &path)), "");
            let was_in_time = command();
            eventually("the image is free", || ubtrfs(["filesystem", "df", &path]).status.success());
            if was_in_time {
                return;
            }
            assert_eq!(state(), None);
        }
        panic!("no command was in time: {what}");
    };
    eventually_during("status", &mut || state().as_deref() == Some("running"));
    eventually_during("another command", &mut || {
        let busy = ubtrfs(["filesystem", "df", &path]);
        let stderr = String::from_utf8_lossy(&busy.stderr);
        stderr.contains("balances it; see: ubtrfs balance status") && stderr.contains("ubtrfs balance cancel")
    });
    eventually_during("another user", &mut || {
        let denied = as_nobody(&["balance", "pause", &path]);
        let stderr = String::from_utf8_lossy(&denied.stderr);
        assert!(!denied.status.success(), "{denied:?}");
        stderr.contains("only root and the user who opened the image")
    });
    eventually_during("pause", &mut || {
        let is_paused = balance(&["pause"], &path).status.success();
        if is_paused {
            assert_eq!(state().as_deref(), Some("paused"));
            ok(balance(&["resume"], &path));
        }
        is_paused
    });
    eventually_during("a queued balance", &mut || {
        let was_running = state().is_some();
        ok(balance(&["start", "--enqueue", "-dusage=0"], &path));
        was_running
    });
    eventually_during("cancel", &mut || {
        let is_cancelled = balance(&["cancel"], &path).status.success();
        // When the command returns, the image is free.
        ok(ubtrfs(["filesystem", "df", &path]));
        is_cancelled
    });
    assert_eq!(state(), None);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn umount_names_the_balance_that_keeps_the_mount_busy() {
    let Some(Bed { image, path, dir: _dir, at }) = Bed::new() else { return };
    ok(ubtrfs(["mount", &path, &at]));
    let mut send = waiting_send(&at);
    refused(&ubtrfs(["umount", &at]), &["is busy"]);
    assert_eq!(ok(balance(&["start", "--bg", "-m"], &at)), "");
    refused(
        &ubtrfs(["umount", &at]),
        &["is busy", &format!("a balance is running, end it with: ubtrfs balance cancel {at}")],
    );
    send.kill().unwrap();
    send.wait().unwrap();
    eventually("nobody uses the mount", || ubtrfs(["umount", &at]).status.success());
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_queued_balance_waits_in_the_background() {
    let Some(Bed { image, path, dir: _dir, at }) = Bed::new() else { return };
    let is_idle = || balance(&["status"], &at).status.success();
    ok(ubtrfs(["mount", &path, &at]));
    let mut send = waiting_send(&at);
    assert_eq!(ok(balance(&["start", "--bg", "-m"], &at)), "");
    refused(&balance(&["start", "--bg", "-musage=0"], &at), &["a balance is running"]);
    refused(&balance(&["start", "--bg", "--enqueue", "-dconvert=raid1"], &at), &["single, dup or raid0"]);
    // A signal ends a balance that waits in the foreground.
    let mut queued = crate::common::command(["balance", "start", "--enqueue", "-musage=0", &at]);
    let queued = queued.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    sh("kill", ["-TERM", &queued.id().to_string()]).unwrap();
    refused(&queued.wait_with_output().unwrap(), &["cancelled while waiting for another balance"]);
    assert!(!is_idle(), "the first balance still waits");
    let begun = Instant::now();
    assert_eq!(ok(balance(&["start", "--bg", "--enqueue", "-dconvert=dup"], &at)), "");
    assert!(!is_idle(), "the first balance still waits");
    assert!(begun.elapsed() < Duration::from_secs(20), "it was not waited for");
    send.kill().unwrap();
    send.wait().unwrap();
    eventually("the second balance is complete", || {
        is_idle() && {
            let report = ok(ubtrfs(["filesystem", "df", &at]));
            report.contains("Data, DUP") && !report.contains("Data, single")
        }
    });
    eventually("nobody uses the mount", || ubtrfs(["umount", &at]).status.success());
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_damaged_extent_is_named_and_stays() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = filled();
    let path = image.path().to_str().unwrap().to_owned();
    // Find the content of file-2 in the image by its bytes.
    let step = 1 << 20;
    let damaged = (0..1024_u64)
        .map(|number| number * step)
        .find(|at| image.read_at(*at, 8192).unwrap().iter().all(|byte| *byte == 2));
    image.write_at(damaged.unwrap(), &[0xff; 100]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    std::fs::rename(mount.join("file-2"), mount.path().join(OsStr::from_bytes(b"file-2\n\\\xff"))).unwrap();
    mount.close().unwrap();
    let output = balance(&["start", "-d"], &path);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(r"used by file-2\n\\\xff:") && said.contains("stays") && !said.contains("file-1"), "{said}");
    for number in [0, 1, 3] {
        assert!(ok(ubtrfs(["cat", &format!("{path}:/file-{number}")])).len() == 20 << 20);
    }
    assert!(ok(balance(&["status"], &path)).starts_with("No balance found"));
    // In the background, syslog gets the message.
    if let Ok(syslog) = UnixDatagram::bind("/dev/log") {
        ok(balance(&["start", "--bg", "-d"], &path));
        syslog.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let expected = format!("]: balance of {path}: ubtrfs: the extent at ");
        let mut message = [0; 4096];
        while !String::from_utf8_lossy(&message).contains(&expected) {
            message = [0; 4096];
            syslog.recv(&mut message).unwrap();
        }
        std::fs::remove_file("/dev/log").unwrap();
        eventually("the image is free", || ubtrfs(["filesystem", "df", &path]).status.success());
    }
    // After the file is removed, its block group can be emptied.
    let removed = [format!("{path}:/").as_bytes(), b"file-2\n\\\xff"].concat();
    ok(ubtrfs([OsStr::new("rm"), OsStr::from_bytes(&removed)]));
    ok(balance(&["start", "-d"], &path));
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_damaged_extent_that_stops_a_resize_is_named() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    sh("fallocate", ["-l", "500M", &mount.join("first").to_string_lossy()]).unwrap();
    std::fs::write(mount.join("file"), vec![2; 100 << 20]).unwrap();
    std::fs::remove_file(mount.join("first")).unwrap();
    mount.close().unwrap();
    let is_file = |at: &u64| image.read_at(*at, 8192).unwrap().iter().all(|byte| *byte == 2);
    let last = (0..1024_u64).rev().map(|number| number << 20).find(is_file);
    image.write_at(last.unwrap(), &[0xff; 100]).unwrap();
    let path = image.path().to_str().unwrap();
    refused(&ubtrfs(["filesystem", "resize", "400M", path]), &["cannot resize", "it is used by file"]);
    ok(ubtrfs(["rm", &format!("{path}:/file")]));
    ok(ubtrfs(["filesystem", "resize", "400M", path]));
    btrfs_check(image.path()).unwrap();
}

/// If block groups are nearly full or converted, their chunks are copied as they are, except for damaged data.
#[test]
fn a_damaged_extent_in_a_copied_chunk_is_named_and_stays() {
    if !capability::kernel_oracle() {
        return;
    }
    let whole = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = LoopMount::new(whole.path(), "").unwrap();
    let names = 0..56_u8;
    for number in names.clone() {
        std::fs::write(mount.join(format!("file-{number}")), vec![number + 1; 4 << 20]).unwrap();
    }
    mount.close().unwrap();
    let at = |image: &Image, wanted: u8| -> Vec<u64> {
        let is_wanted = |at: &u64| image.read_at(*at, 8192).unwrap().iter().all(|byte| *byte == wanted);
        (0..1024_u64).map(|number| number << 20).filter(is_wanted).collect()
    };
    // With two copies of data, both are damaged.
    for (profile, filters) in [
        ("single", &["-dusage=100"][..]),
        ("single", &["-dconvert=dup"]),
        ("dup", &["-dconvert=single"]),
        ("dup", &["-ddevid=1"]),
    ] {
        let image = Image::copy_of(whole.path()).unwrap();
        let path = image.path().to_str().unwrap().to_owned();
        std::fs::File::options().write(true).open(image.path()).unwrap().set_len(1 << 30).unwrap();
        ok(ubtrfs(["filesystem", "resize", "max", &path]));
        if profile == "dup" {
            ok(balance(&["start", "-dconvert=dup"], &path));
        }
        let places = at(&image, 3 + 1);
        for place in &places {
            image.write_at(place + 8192, &[0xff; 100]).unwrap();
        }
        let output = balance(&[&["start"], filters].concat(), &path);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{profile} {filters:?}: {said}");
        assert!(said.contains("stays, used by file-3:"), "{profile} {filters:?}: {said}");
        // The copy leaves out only the damaged file.
        let out = tempfile::tempdir().unwrap();
        let copied = ubtrfs(["cp", "-r", &format!("{path}:/"), out.path().join("copy").to_str().unwrap()]);
        assert!(!copied.status.success() && String::from_utf8_lossy(&copied.stderr).contains("file-3"), "{copied:?}");
        for number in names.clone().filter(|number| *number != 3) {
            let content = std::fs::read(out.path().join(format!("copy/file-{number}"))).unwrap();
            assert!(content == vec![number + 1; 4 << 20], "file-{number}");
        }
        ok(ubtrfs(["rm", &format!("{path}:/file-3")]));
        ok(balance(&[&["start"], filters].concat(), &path));
        btrfs_check(image.path()).unwrap();
    }
}

#[test]
fn a_balance_of_a_full_filesystem_says_so_and_loses_nothing() {
    let image = Image::empty(256 << 20).unwrap();
    let path = image.path().to_str().unwrap();
    ok(ubtrfs(["mkfs", "-f", path]));
    let file = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..4 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(file.path(), &content).unwrap();
    let source = file.path().to_str().unwrap();
    let copy = |number: usize| ubtrfs(["cp", source, &format!("{path}:/file-{number}")]).status.success();
    let nr_files = (0..80).take_while(|number| copy(*number)).count();
    assert!((10..80).contains(&nr_files), "{nr_files} files");
    let full = "block groups stay, because there is no space left";
    let too_much = "bytes are missing; add a device first";
    for (filters, words) in [(&["-d"][..], full), (&["--full-balance"], full), (&["-dconvert=dup"], too_much)] {
        let output = balance(&[&["start"], filters].concat(), path);
        refused(&output, &[words]);
        assert!(ok(balance(&["status"], path)).starts_with("No balance found"), "{filters:?}");
    }
    for number in 0..nr_files {
        let found = ubtrfs(["cat", &format!("{path}:/file-{number}")]);
        assert!(found.status.success() && found.stdout == content, "file-{number}");
    }
    second_opinion(image.path()).unwrap();
    if capability::kernel_oracle() {
        btrfs_check(image.path()).unwrap();
    }
}

#[test]
fn wrong_filters_are_told() {
    for (filters, word) in [
        ("-dusag=5", "unknown filter 'usag=5'"),
        ("-dusage=x", "'x' is not a percentage"),
        ("-dlimit=x", "'x' is not a number"),
        ("-dusage=101", "usage"),
        ("-ddrange=1..2", "devid"),
        ("-msoft", "convert"),
        ("-mlimit=5..2", "limit"),
        ("-mconvert=triple", "triple"),
    ] {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(200 << 20).unwrap();
        let path = image.path().to_str().unwrap();
        ok(ubtrfs(["mkfs", "-f", path]));
        let output = balance(&["start", filters], path);
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(word), "{filters}: {said}");
    }
}

#[test]
fn only_profiles_that_can_be_written_are_offered() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(200 << 20).unwrap();
    let path = image.path().to_str().unwrap();
    ok(ubtrfs(["mkfs", "-f", path]));
    let said = |filters: &str| {
        let output = balance(&["start", filters], path);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let offered = said("-dconvert=triple");
    assert!(offered.contains("raid1c4, raid10") && !offered.contains("raid5"), "{offered}");
    assert!(said("-dprofiles=triple").contains("raid5"));
    assert!(said("-dconvert=raid5").contains("profiles with parity"));
}

#[test]
fn status_1_of_balance_status_means_a_balance_and_2_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.img").display().to_string();
    for words in [&["status", &missing][..], &["status", "--bogus", &missing], &["status"]] {
        let output = ubtrfs([&["balance"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// As with btrfs-progs, a pause or a cancellation is the wanted end of `btrfs balance start`, but not of `resume`.
#[test]
fn a_balance_that_is_stopped_on_request_ends_btrfs_as_btrfs_progs_ends() {
    let Some(Bed { image, path, dir: _dir, at }) = Bed::new() else { return };
    let links = tempfile::tempdir().unwrap();
    let link = links.path().join("btrfs");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), &link).unwrap();
    ok(ubtrfs(["mount", &path, &at]));
    let mut send = waiting_send(&at);
    let stopped_by = |words: &[&str], stop: &str, by_link: bool| {
        let program = if by_link { link.as_os_str() } else { OsStr::new(env!("CARGO_BIN_EXE_ubtrfs")) };
        let mut command = std::process::Command::new(program);
        command.arg("balance").args(words).arg(&at).env("LC_ALL", "C");
        let running = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("it runs", || String::from_utf8_lossy(&balance(&["status"], &at).stdout).contains("is running"));
        ok(balance(&[stop], &at));
        let output = running.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let start = ["start", "-m"];
    assert_eq!(stopped_by(&start, "pause", true), (Some(0), "balance paused by user\n".to_owned()));
    assert_eq!(stopped_by(&["resume"], "cancel", true), (Some(255), "balance canceled by user\n".to_owned()));
    assert_eq!(stopped_by(&start, "cancel", true), (Some(0), "balance canceled by user\n".to_owned()));
    let (status, stderr) = stopped_by(&start, "cancel", false);
    assert!(status == Some(1) && stderr.contains("the balance was cancelled"), "{status:?} {stderr}");
    send.kill().unwrap();
    send.wait().unwrap();
    eventually("nobody uses the mount", || ubtrfs(["umount", &at]).status.success());
    btrfs_check(image.path()).unwrap();
}
