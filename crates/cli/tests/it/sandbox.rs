//! Tests of what an image can reach that has taken over its confined server: the helper process, and the programs that
//! use the mount.
//!
//! Method: the tests start the helper process of a mount and ask it in place of the server, with every byte and with
//! hostile numbers. The table of mounts shows what it has unmounted. `fuse/tests/it/injected_calls.rs` tests the server.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{NOBODY, let_users_mount, ok, ubtrfs};
use tempfile::TempDir;
use ubtrfs_testkit::capability;

/// Whether the tests can run: they need root, who may mount other filesystems over a mount.
fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle()
}

/// A directory with mount points, in a filesystem of its own, so that mounts in it can be moved.
struct Bed {
    dir: TempDir,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { dir: TempDir::with_prefix("ubtrfs-sandbox-").unwrap() };
        sh(&["mount", "-t", "tmpfs", "bed", text(bed.dir.path())]);
        sh(&["mount", "--make-private", text(bed.dir.path())]);
        for name in ["a", "b"] {
            fs::create_dir(bed.join(name)).unwrap();
        }
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", text(&bed.image())]));
        bed
    }

    fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.join("image")
    }

    /// Mounts the image on `a` with these arguments.
    fn mount(&self, args: &[&str]) -> PathBuf {
        let dir = self.join("a");
        let (image, shown) = (self.image(), dir.clone());
        let mut all = vec!["mount"];
        all.extend(args);
        all.extend([text(&image), text(&shown)]);
        ok(ubtrfs(all));
        dir
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for name in ["a", "a", "a", "b", ""] {
            let _ = Command::new("umount").arg("-l").arg(self.join(name)).stderr(Stdio::null()).status();
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn sh(words: &[&str]) {
    assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success(), "{words:?}");
}

/// The types of the mounts on a directory, the topmost last.
fn mounts_on(dir: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/mounts").unwrap();
    let words = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    words.filter(|words| words[1] == text(dir)).map(|words| words[2].to_owned()).collect()
}

/// The options of the mount on a directory.
fn options_of(dir: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/mounts").unwrap();
    let found = table.lines().rfind(|line| line.split(' ').nth(1) == Some(text(dir))).unwrap();
    found.split(' ').nth(3).unwrap().split(',').map(str::to_owned).collect()
}

/// A helper process, whose server is this process.
struct Helper(Child);

impl Helper {
    fn start(image: &Path, dir: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(["mount", "--unmounter", "--"]).arg(image).arg(dir).current_dir("/");
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn ask(&mut self, kind: u8, numbers: [u32; 3]) -> String {
        let mut question = vec![kind];
        question.extend(numbers.map(u32::to_le_bytes).as_flattened());
        self.0.stdin.as_mut().unwrap().write_all(&question).unwrap();
        let mut answer = [0; 2];
        self.0.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// The inode of the file that a process has open.
    fn inode_of(&mut self, pid: u32, descriptor: u32) -> Option<u64> {
        (self.ask(b'f', [pid, descriptor, u32::MAX]) == "ok").then(|| {
            let mut numbers = [0; 24];
            self.0.stdout.as_mut().unwrap().read_exact(&mut numbers).unwrap();
            u64::from_le_bytes(numbers[8..16].try_into().unwrap())
        })
    }

    fn unmount(&mut self, lazy: bool) -> String {
        self.ask(if lazy { b'l' } else { b'p' }, [0; 3])
    }

    fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const OURS: &str = "fuse.ubtrfs";
/// Numbers that are no process, no group and no descriptor, or that are those of an important process.
const HOSTILE: [[u32; 3]; 5] = [[0; 3], [1, 0, 0], [1; 3], [u32::MAX; 3], [i32::MAX.cast_unsigned(); 3]];

/// A mount, and a helper that knows it; `None` if the tests cannot run.
fn knowing_helper() -> Option<(Bed, PathBuf, Helper)> {
    if !ready() {
        return None;
    }
    let bed = Bed::new();
    let dir = bed.mount(&[]);
    let mut helper = Helper::start(&bed.image(), &dir);
    assert_eq!(helper.ask(b'm', [0; 3]), "ok");
    Some((bed, dir, helper))
}

#[test]
fn no_question_but_an_unmount_unmounts() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    let dir = bed.mount(&[]);
    let mut helper = Helper::start(&bed.image(), &dir);
    let others = |helper: &mut Helper| {
        for kind in (0..=u8::MAX).filter(|kind| !b"mpl".contains(kind)) {
            for numbers in HOSTILE {
                let answer = helper.ask(kind, numbers);
                let is_known = b"gucfrknadso".contains(&kind);
                assert!(is_known || answer == "??", "{kind}: {answer}");
            }
        }
        assert_eq!(mounts_on(&dir), [OURS], "it is still mounted");
    };
    others(&mut helper);
    assert_eq!(helper.unmount(false), "no", "it does not know the mount");
    assert_eq!(helper.unmount(true), "no");
    assert_eq!(helper.ask(b'm', [0; 3]), "ok");
    assert_eq!(helper.ask(b'm', [0; 3]), "no", "it learns the mount once");
    others(&mut helper);
    assert_eq!(helper.unmount(false), "ok");
    assert_eq!(mounts_on(&dir), [""; 0]);
    assert_eq!([helper.unmount(false), helper.unmount(true)], ["go", "go"]);
}

#[test]
fn the_helper_unmounts_no_other_mount() {
    let Some((bed, dir, mut helper)) = knowing_helper() else { return };
    sh(&["mount", "-t", "tmpfs", "other", text(&dir)]);
    assert_eq!([helper.unmount(false), helper.unmount(true)], ["no", "no"], "another mount covers it");
    assert_eq!(mounts_on(&dir), [OURS, "tmpfs"]);
    sh(&["umount", text(&dir)]);
    let moved = bed.join("b");
    sh(&["mount", "--move", text(&dir), text(&moved)]);
    sh(&["mount", "-t", "tmpfs", "other", text(&dir)]);
    assert_eq!(helper.unmount(false), "ok", "it unmounts its mount elsewhere");
    assert_eq!((mounts_on(&dir), mounts_on(&moved)), (vec!["tmpfs".to_owned()], vec![]));
    assert_eq!(helper.unmount(true), "go");
    sh(&["umount", text(&dir)]);
    // The new mount may have the old one's number and device.
    bed.mount(&[]);
    assert_eq!([helper.unmount(false), helper.unmount(true)], ["go", "go"], "a later mount of the same image");
    assert_eq!(mounts_on(&dir), [OURS]);
    let mut second = Helper::start(&bed.image(), &dir);
    assert_eq!(second.ask(b'm', [0; 3]), "ok");
    ok(ubtrfs(["umount", text(&dir)]));
    bed.mount(&[]);
    assert_eq!([second.unmount(false), second.unmount(true)], ["go", "go"], "it was unmounted by another program");
    assert_eq!(mounts_on(&dir), [OURS]);
}

#[test]
fn the_helper_of_root_gives_up_the_rights_of_root() {
    let Some((_bed, _dir, helper)) = knowing_helper() else { return };
    // CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_SYS_NICE
    let kept = format!("{:016x}", 1u64 << 2 | 1 << 19 | 1 << 21 | 1 << 23);
    for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
        assert_eq!(helper.status(set), kept, "{set}");
    }
    for set in ["CapInh:", "CapAmb:"] {
        assert_eq!(helper.status(set), "0000000000000000", "{set}");
    }
    assert_eq!(
        (helper.status("NoNewPrivs:"), helper.status("Seccomp:"), helper.status("Groups:")),
        ("1".into(), "2".into(), String::new())
    );
}

#[test]
fn the_helper_tells_and_moves_only_what_is_of_the_mount() {
    let Some((_bed, dir, mut helper)) = knowing_helper() else { return };
    let (inside, outside) = (File::create(dir.join("file")).unwrap(), File::open("/etc/passwd").unwrap());
    let own = std::process::id();
    let descriptor = |file: &File| file.as_raw_fd().cast_unsigned();
    assert_eq!(helper.inode_of(own, descriptor(&inside)), Some(inside.metadata().unwrap().ino()));
    assert_eq!(helper.ask(b'f', [own, descriptor(&outside), u32::MAX]), "el", "a file of another filesystem");
    assert_eq!(helper.ask(b'f', [own, 9999, u32::MAX]), "no");
    assert_eq!(helper.ask(b'f', [own, descriptor(&inside), 12_345]), "no", "a process of another user");
    let halves = |device: u64| [own, device as u32, (device >> 32) as u32];
    assert_eq!(helper.ask(b'r', halves(inside.metadata().unwrap().dev())), "no", "it is open for writing");
    assert_eq!(helper.ask(b'r', halves(outside.metadata().unwrap().dev())), "??");
    let mut other = Command::new("sleep").arg("100").spawn().unwrap();
    assert_eq!(helper.ask(b'a', [other.id(), 0, 0]), "no", "a process that is not the server");
    let (tell, told) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()).unwrap();
        let _ = ended.recv();
    });
    let id = told.recv().unwrap();
    let allowed = || {
        let status = fs::read_to_string(format!("/proc/self/task/{id}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    let everywhere = allowed();
    assert_eq!((helper.ask(b'a', [id, 0, 0]), allowed()), ("ok".to_owned(), "0".to_owned()));
    assert_eq!((helper.ask(b'a', [id, u32::MAX, 0]), allowed()), ("ok".to_owned(), everywhere));
    assert_eq!(helper.ask(b'd', halves(inside.metadata().unwrap().dev())), "no", "there is no device to claim");
    drop(end);
    thread.join().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
}

/// A confined server may not move its threads itself, because the call could move another process of its user.
#[test]
fn the_helper_moves_the_threads_of_a_confined_server() {
    if !ready() || !capability::program("python3") {
        return;
    }
    let bed = Bed::new();
    let dir = bed.mount(&["--sandbox", "-o", "noio_uring"]);
    let server = crate::common::server_of(&dir);
    // The processors of each thread that takes requests.
    let places = || {
        let tasks = fs::read_dir(format!("/proc/{server}/task")).unwrap().flatten().map(|task| task.path());
        let readers = tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "fuse\n"));
        let statuses = readers.filter_map(|task| fs::read_to_string(task.join("status")).ok());
        let place = |status: String| {
            Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
        };
        statuses.filter_map(place).collect::<Vec<_>>()
    };
    // The threads start after the mount.
    while places().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let everywhere = places();
    if !everywhere[0].contains(['-', ',']) {
        assert!(std::env::var_os("CI").is_none(), "CI needs two processors");
        eprintln!("SKIPPED: this test needs two processors");
        return;
    }
    let program = "import os, time\nend = time.time() + 1\nwhile time.time() < end: os.statvfs('.')";
    let gathers = || {
        let mut client = Command::new("python3").args(["-c", program]).current_dir(&dir).spawn().unwrap();
        let mut gathers = false;
        while client.try_wait().unwrap().is_none() {
            gathers |= places().iter().any(|place| *place != everywhere[0]);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        gathers
    };
    // On a busy machine, requests may be too sparse.
    assert!((0..20).any(|_| gathers()), "never gathered");
    let is_spread = || places().iter().all(|place| *place == everywhere[0]);
    assert!((0..500).any(|_| is_spread() || {
        std::thread::sleep(std::time::Duration::from_millis(10));
        false
    }));
    ok(ubtrfs(["umount", text(&dir)]));
}

#[test]
fn devices_and_set_user_id_programs_of_an_untrusted_image_do_not_work() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    let has = |option: &str| options_of(&bed.join("a")).iter().any(|given| given == option);
    let umount = || drop(ok(ubtrfs(["umount", text(&bed.join("a"))])));
    for (args, nodev, nosuid) in [
        (&["--sandbox"][..], true, true),
        (&["--sandbox", "-o", "dev"], false, true),
        (&["--sandbox", "-o", "suid,dev"], false, false),
        (&[], false, false),
    ] {
        let dir = bed.mount(args);
        assert_eq!((has("nodev"), has("nosuid")), (nodev, nosuid), "{args:?}");
        let null = dir.join("null");
        if !null.exists() {
            sh(&["mknod", text(&null), "c", "1", "3"]);
        }
        assert_eq!(File::open(&null).is_err(), nodev, "{args:?}");
        umount();
    }
    let dir = bed.mount(&["--sandbox"]);
    ok(ubtrfs(["mount", "-o", "remount,ro", text(&bed.image()), text(&dir)]));
    assert!(has("nodev") && has("nosuid") && has("ro"), "a remount keeps what it does not mention");
    ok(ubtrfs(["mount", "-o", "remount,dev,suid", text(&bed.image()), text(&dir)]));
    assert!(!has("nodev") && !has("nosuid"));
    umount();
}

#[test]
fn an_ordinary_user_is_told_that_dev_and_suid_have_no_effect() {
    if !ready() {
        return;
    }
    let_users_mount();
    let bed = Bed::new();
    sh(&["chmod", "755", text(bed.dir.path())]);
    sh(&["chown", "nobody", text(&bed.image()), text(&bed.join("a"))]);
    let as_nobody = |args: &[&str]| {
        let (program, args) = (env!("CARGO_BIN_EXE_ubtrfs"), args.to_vec());
        let image = bed.image();
        let dir = bed.join("a");
        Command::new(NOBODY[0]).args(&NOBODY[1..]).arg(program).args(args).args([image, dir]).output().unwrap()
    };
    let output = as_nobody(&["mount", "-o", "suid,dev"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("'dev,suid' has no effect") && said.contains("mount as root"), "{said}");
    let options = options_of(&bed.join("a"));
    assert!(["nodev", "nosuid"].iter().all(|flag| options.iter().any(|option| option == flag)), "{options:?}");
    ok(ubtrfs(["umount", text(&bed.join("a"))]));
    let output = as_nobody(&["mount", "-o", "nosuid,dev,nodev"]);
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
    ok(ubtrfs(["umount", text(&bed.join("a"))]));
}
