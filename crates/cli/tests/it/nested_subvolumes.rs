//! Tests nested subvolumes and snapshots with programs: find, cp, tar, rsync, du, grep, diff, ls, rm, chown, git.
//!
//! Method: the built program mounts an image with nested subvolumes. Each program runs on this mount and on Linux's
//! mount of the image, and must print, copy and leave equal results. A FUSE mount has one device number for all
//! subvolumes, so the test also checks that all inode numbers of the mount differ, and that they are equal after the
//! next mount.

#[allow(dead_code, reason = "nothing is refused here")]
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::{Compare, Image, LoopMount, Rng, btrfs_check, capability, compare_entries, walk_path};

use crate::common::{ok, ubtrfs};

fn ready() -> bool {
    capability::fuse()
        && capability::kernel_oracle()
        && ["find", "tar", "rsync", "git", "python3"].iter().all(|name| capability::program(name))
}

/// Our mount; unmounted on drop, also if the test panics.
struct Ours {
    dir: TempDir,
    mounted: bool,
}

impl Ours {
    fn new(image: &Path) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-nested-").unwrap();
        ok(ubtrfs([OsStr::new("mount"), image.as_os_str(), dir.path().as_os_str()]));
        Self { dir, mounted: true }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn subvolume(&self, words: &[&str]) {
        let [command, paths @ ..] = words else { panic!("a command") };
        let paths = paths.iter().map(|word| if word.starts_with('-') { PathBuf::from(word) } else { self.at(word) });
        ok(ubtrfs(["subvolume".into(), (*command).into()].into_iter().chain(paths)));
    }

    fn umount(mut self) {
        self.mounted = false;
        ok(ubtrfs([OsStr::new("umount"), self.dir.path().as_os_str()]));
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        if self.mounted {
            let _ = ubtrfs([OsStr::new("umount"), OsStr::new("-l"), self.dir.path().as_os_str()]);
        }
    }
}

/// Makes an image with users' subvolumes, snapshots beside and inside their sources, and the empty directories that
/// snapshots have in place of nested subvolumes.
fn nested() -> Image {
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let ours = Ours::new(image.path());
    for path in ["home", "home/ann", "home/ann/mail", "home/bob", "var", "var/cache", "empty"] {
        ours.subvolume(&["create", path]);
    }
    let mut rng = Rng::new(2);
    for dir in ["home", "home/ann", "home/ann/mail", "home/bob", "var", "var/cache"] {
        for (below, nr_files) in [("", 3), ("d", 300), ("d/e/f", 5)] {
            let below = ours.at(dir).join(below);
            fs::create_dir_all(&below).unwrap();
            for number in 0..nr_files {
                let text = format!("{dir} {number}\n{}", if number % 7 == 0 { "needle\n" } else { "" });
                fs::write(below.join(format!("file{number}")), text).unwrap();
            }
        }
        fs::write(ours.at(dir).join("large"), rng.bytes(300_000)).unwrap();
        fs::hard_link(ours.at(dir).join("large"), ours.at(dir).join("d/link")).unwrap();
        std::os::unix::fs::symlink("../large", ours.at(dir).join("d/symlink")).unwrap();
    }
    ok(ubtrfs([OsStr::new("sync"), ours.dir.path().as_os_str()]));
    ours.subvolume(&["create", "home/.snapshots"]);
    for words in [
        &["snapshot", "-r", "home", "home-1"][..],
        &["snapshot", "home", "home-2"],
        &["snapshot", "-r", "home", "home/.snapshots/1"],
        &["snapshot", "home/ann", "home/ann/again"],
        &["snapshot", "var/cache", "var/cache-1"],
    ] {
        ours.subvolume(words);
    }
    fs::write(ours.at("home-2/new"), "needle").unwrap();
    ours.umount();
    btrfs_check(image.path()).unwrap();
    image
}

/// Runs a shell script in this directory, in the POSIX locale, and returns its output.
#[track_caller]
fn sh(dir: &Path, out: &Path, script: &str) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "300", "bash", "-ec", script, "sh"]).arg(out).current_dir(dir);
    let output = command.env("LC_ALL", "C").env("TZ", "UTC").env("HOME", out).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}: {}: {text}", output.status);
    text
}

/// Fails unless each script printed the expected lines. The message shows the first wrong line of each script.
#[track_caller]
fn compare(scripts: &[&str], printed: &[String], expected: &[String]) {
    let mut differences = Vec::new();
    for ((script, printed), expected) in scripts.iter().zip(printed).zip(expected) {
        let (mut ours, mut theirs) = (printed.lines(), expected.lines());
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => break,
                (ours, theirs) if ours == theirs => {}
                (ours, theirs) => {
                    differences.push(format!("{script}:\n  {ours:?}\n  Linux: {theirs:?}"));
                    break;
                }
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Scripts that only read the filesystem. `$1` is a directory for their output.
const READERS: &[&str] = &[
    "find . | sort",
    "find . -type f -printf '%p %s %b %n %m\\n' | sort",
    "find home -depth -name 'file1*' | sort",
    "du -s . 2>&1",
    // This du gets one operand only: with two, du skips directories whose inode number it has seen, and on Linux all
    // empty directories in place of subvolumes have the same inode number.
    "du -a home | sort -k2",
    "du -sh --inodes home | cut -f2",
    "grep -rc needle . | sort",
    "grep -r needle home-1 home | sort | head -500",
    "diff -rq home home-1 | sort || true",
    "diff -r home/ann/d home/ann/again/d",
    "ls -laR --time-style=full-iso home/ann/d home/bob var/cache",
    "ls -laR --time-style=+ home home-1 var empty",
    "cp -a . $1/copy 2>&1; find $1/copy | wc -l",
    "tar cf $1/all.tar .; tar tf $1/all.tar | sort",
    "rsync -aHAX --stats ./ $1/rsync | grep -E 'Number of|Total file size'",
    "rsync -aHnO --itemize-changes ./ $1/rsync",
    "tar cf - home | tar dvf - | grep -c . ",
    "python3 -c 'import os; print(sorted(len(f) for r, d, f in os.walk(\".\")))'",
];

#[test]
fn programs_that_read_see_in_nested_subvolumes_what_they_see_on_linux() {
    if !ready() {
        return;
    }
    let image = nested();
    let (our_out, their_out) = (TempDir::with_prefix("ubtrfs-o-").unwrap(), TempDir::with_prefix("ubtrfs-t-").unwrap());
    // Each run has its own output directory, so the directory's path is replaced in the printed text.
    let run = |dir: &Path, out: &Path| -> Vec<String> {
        let shown = out.display().to_string();
        READERS.iter().map(|script| sh(dir, out, script).replace(&shown, "OUT")).collect()
    };
    let ours = Ours::new(image.path());
    let printed = run(ours.dir.path(), our_out.path());
    ours.umount();
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let expected = run(linux.path(), their_out.path());
    linux.close().unwrap();
    compare(READERS, &printed, &expected);
    for copy in ["copy", "rsync"] {
        let [ours, theirs] = [&our_out, &their_out].map(|out| walk_path(&out.path().join(copy)).unwrap());
        // For an empty directory in place of a subvolume, Linux shows a time that is not stored on disk, so times are
        // not compared.
        compare_entries(&ours, &theirs, Compare { mtime: false, ..Compare::COPY }).unwrap();
        assert!(ours.len() > 3000, "{}", ours.len());
    }
}

/// Scripts that change the filesystem.
const WRITERS: &[&str] = &[
    "chown -R 1234:1235 home/ann home/bob && chmod -R g-r var",
    "mv var/cache/d home/bob/moved",
    "cp -a home/ann/mail home/bob/mail-copy && rsync -a --delete home/bob/d/ home/ann/d/",
    "tar cf - -C home/ann . | tar xf - -C empty",
    "cd home && git init -q . && git config gc.auto 0 && git config user.email a@b && git config user.name a && git add -A bob/d ann && \
     git commit -qm one && echo x >> ann/mail/file1 && rm bob/d/file2 && git status --short && git commit -qam two && \
     git ls-files | wc -l && git clean -fdxq -e .snapshots bob/d/e && git reset -q --hard HEAD~1 && git status --short | sort && \
     git gc -q && git fsck 2>&1",
    "find home/ann/again -name 'file*' -delete; find home/ann/again | sort",
    "rm -rf home-2 home/ann/again var/cache; ls -R var home-2 2>&1 | sort || true",
    "rm -rf home/ann empty; find . | grep -v '/.git/' | sort",
];

#[test]
fn programs_that_change_nested_subvolumes_leave_what_they_leave_on_linux() {
    if !ready() {
        return;
    }
    let image = nested();
    let twin = Image::kernel_made(1 << 30, &[]).unwrap();
    fs::copy(image.path(), twin.path()).unwrap();
    let out = TempDir::with_prefix("ubtrfs-o-").unwrap();
    let run = |dir: &Path| -> Vec<String> { WRITERS.iter().map(|script| sh(dir, out.path(), script)).collect() };
    let ours = Ours::new(image.path());
    let printed = run(ours.dir.path());
    ours.umount();
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(twin.path(), "").unwrap();
    let expected = run(linux.path());
    let left = walk_path(linux.path()).unwrap();
    linux.close().unwrap();
    compare(WRITERS, &printed, &expected);
    let linux = LoopMount::new(image.path(), "").unwrap();
    let what = Compare { mtime: false, dir_size: false, ..Compare::ALL };
    let without_git = |mut entries: Vec<ubtrfs_testkit::TreeEntry>| {
        entries.retain(|entry| !String::from_utf8_lossy(&entry.path).contains("/.git"));
        entries
    };
    compare_entries(&without_git(walk_path(linux.path()).unwrap()), &without_git(left), what).unwrap();
    linux.scrub().unwrap();
    linux.close().unwrap();
}

/// Prints for each path its `st_ino`, the inode number in its directory entry, and its file handle.
const NUMBERS: &str = r#"
import ctypes, json, os, struct, subprocess, sys
os.chdir(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def handle(path):
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128), 136)
    mount = ctypes.c_int()
    if libc.name_to_handle_at(-100, path.encode(), buffer, ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), path)
    return buffer.raw.hex()
def names(path):
    # `ls -f` prints what is in the entries; `..` among them.
    text = subprocess.run(["ls", "-if", path], check=True, capture_output=True, text=True).stdout
    return {name: int(ino) for ino, name in (line.split(None, 1) for line in text.splitlines())}
out = {".": [os.stat(".").st_ino, handle(".")]}
for at, dirs, files in os.walk("."):
    entries = names(at)
    for name in dirs + files:
        path = os.path.join(at, name)
        ino = os.lstat(path).st_ino
        assert ino == entries[name], (path, ino, entries[name])
        out[path] = [ino, handle(path)]
    assert entries["."] == os.stat(at).st_ino, at
    # Of a mount's root, `ls` asks above the mount.
    above = os.stat(os.path.join(at, "..")).st_ino
    assert entries[".."] == above, (at, entries[".."], above)
print(json.dumps(out))
"#;

/// Opens each file by its handle from an earlier mount.
const OPEN_HANDLES: &str = r#"
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
mount = os.open(sys.argv[1], os.O_RDONLY)
for path, (ino, handle) in json.load(sys.stdin).items():
    fd = libc.open_by_handle_at(mount, bytes.fromhex(handle), os.O_PATH)
    assert fd >= 0, (path, os.strerror(ctypes.get_errno()))
    assert os.fstat(fd).st_ino == ino, path
    os.close(fd)
"#;

fn numbers(dir: &Path) -> (String, BTreeMap<String, u64>) {
    let text = ubtrfs_testkit::run("python3", [OsStr::new("-c"), OsStr::new(NUMBERS), dir.as_os_str()]).unwrap();
    let parsed: BTreeMap<String, (u64, String)> = serde_json::from_str(&text).unwrap();
    (text, parsed.into_iter().map(|(path, (ino, _))| (path, ino)).collect())
}

#[test]
fn inode_numbers_are_unique_in_a_mount_and_the_same_after_the_next() {
    if !ready() {
        return;
    }
    let image = nested();
    let ours = Ours::new(image.path());
    let (handles, first) = numbers(ours.dir.path());
    let mut seen: HashMap<u64, &str> = HashMap::new();
    for (path, ino) in &first {
        // `link` and `large` are names of one file.
        let is_link = path.ends_with("/link") || path.ends_with("/large");
        if let Some(other) = seen.insert(*ino, path) {
            assert!(is_link, "{path} and {other} are both {ino}");
        }
    }
    assert_eq!(first.iter().filter(|(_, ino)| **ino == 256).map(|(path, _)| path.as_str()).collect::<Vec<_>>(), ["."]);
    let tar = "tar --no-check-device --listed-incremental=$1/state -cf $1/$LEVEL.tar . && tar tf $1/$LEVEL.tar | grep -vc '/$'";
    let out = TempDir::with_prefix("ubtrfs-o-").unwrap();
    let all: usize = sh(ours.dir.path(), out.path(), &tar.replace("$LEVEL", "0")).trim().parse().unwrap();
    assert!(all > 3000, "{all}");
    ours.umount();

    let ours = Ours::new(image.path());
    ubtrfs_testkit::run_with_input(
        "python3",
        [OsStr::new("-c"), OsStr::new(OPEN_HANDLES), ours.dir.path().as_os_str()],
        handles.as_bytes(),
    )
    .unwrap();
    assert_eq!(numbers(ours.dir.path()).1, first);
    let again = sh(ours.dir.path(), out.path(), &format!("{} || true", tar.replace("$LEVEL", "1")));
    assert_eq!(again.trim(), "0", "no file is new to an incremental backup");
    ours.umount();
}

#[test]
fn the_directory_of_a_nested_subvolume_in_a_snapshot_has_no_attributes() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let ours = Ours::new(image.path());
    ours.subvolume(&["create", "sub"]);
    ours.subvolume(&["create", "sub/inner"]);
    ours.subvolume(&["snapshot", "sub", "snapshot"]);
    let set = |path: PathBuf| rustix::fs::setxattr(path, "user.name", b"value", rustix::fs::XattrFlags::empty());
    assert_eq!(set(ours.at("snapshot/inner")), Err(rustix::io::Errno::OPNOTSUPP));
    ours.umount();
    let linux = LoopMount::new(image.path(), "").unwrap();
    assert_eq!(set(linux.join("snapshot/inner")), Err(rustix::io::Errno::OPNOTSUPP));
    linux.close().unwrap();
}
