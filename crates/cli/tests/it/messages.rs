//! Tests that messages are true and their remedies work. Each test sets up a case, checks the message, and follows
//! its advice.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::common::{ok, refused};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use ubtrfs_testkit::capability::{fuse, kernel_oracle};
use ubtrfs_testkit::run as sh;

struct Bed(TempDir);

impl Bed {
    /// Makes `a.img` with `/f`, and the directory `mnt`.
    fn new() -> Self {
        let bed = Self(tempfile::tempdir().unwrap());
        fs::create_dir(bed.join("root")).unwrap();
        fs::create_dir(bed.join("mnt")).unwrap();
        fs::write(bed.join("root/f"), "content").unwrap();
        ok(bed.run("mkfs -q -r root a.img"));
        bed
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(line.split(' ')).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// Finds the mount's server: the process that has the image open.
    fn server(&self) -> Pid {
        let image = fs::canonicalize(self.join("a.img")).unwrap();
        let has_open = |pid: i32| {
            let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            files.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|file| file == image)
        };
        let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        let mut found = pids.filter(|pid| has_open(*pid));
        Pid::from_raw(found.next().unwrap()).unwrap()
    }
}

/// Unmounts even if the test fails.
impl Drop for Bed {
    fn drop(&mut self) {
        for dir in ["mnt", "host"] {
            let _ = Command::new("umount").args(["-l", "-q"]).arg(self.join(dir)).stderr(Stdio::null()).status();
        }
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn an_image_on_a_read_only_filesystem_is_read_as_the_message_says() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    let host = bed.join("host");
    fs::create_dir(&host).unwrap();
    sh("mount", ["-t".as_ref(), "tmpfs".as_ref(), "none".as_ref(), host.as_os_str()]).unwrap();
    // A child that another test has just started would hold a descriptor of this process, which keeps the tmpfs writable.
    sh("cp", [bed.join("a.img").as_os_str(), host.as_os_str()]).unwrap();
    sh("mount", ["-o".as_ref(), "remount,ro".as_ref(), host.as_os_str()]).unwrap();
    for line in ["mount host/a.img mnt", "mkdir host/a.img:/d", "mkfs -q -f host/a.img", "mkfs -q -b 200M host/new.img"]
    {
        let output = bed.run(line);
        refused(&output, &["is read-only", "-o ro"]);
        assert!(!stderr(&output).contains("mode or owner"), "{}", stderr(&output));
    }
    for line in ["mount -o ro host/a.img mnt", "mount -r host/a.img mnt"] {
        ok(bed.run(line));
        assert_eq!(fs::read_to_string(bed.join("mnt/f")).unwrap(), "content");
        ok(bed.run("umount mnt"));
    }
    assert_eq!(ok(bed.run("cat -o ro host/a.img:/f")), "content");
}

#[test]
fn advice_is_never_what_was_done_already() {
    let bed = Bed::new();
    for (line, words) in [
        ("mkfs -q -m single -d single -b 5M b.img", "give a larger device or size\n"),
        ("mkfs -q -b 1 b.img", "too small: this filesystem needs at least"),
        ("rescue super-recover a.img ./a.img", "given twice"),
    ] {
        refused(&bed.run(line), &[words]);
    }
    fs::create_dir(bed.join("links")).unwrap();
    std::os::unix::fs::symlink("f", bed.join("links/link")).unwrap();
    ok(bed.run("mkfs -q -r links c.img"));
    refused(&bed.run("rm c.img:/link/"), &["not a directory"]);
    assert_eq!(ok(bed.run("ls c.img:/")), "link\n");
}

#[test]
fn an_immutable_image_is_called_so() {
    let bed = Bed::new();
    let image = bed.join("a.img");
    if sh("chattr", ["+i".as_ref(), image.as_os_str()]).is_err() {
        return;
    }
    let output = bed.run("mkdir a.img:/d");
    sh("chattr", ["-i".as_ref(), image.as_os_str()]).unwrap();
    refused(&output, &["immutable", "chattr -i"]);
    ok(bed.run("mkdir a.img:/d"));
}

#[test]
fn a_write_protected_device_is_refused_before_it_takes_changes() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    let device =
        sh("losetup", ["-r".as_ref(), "-f".as_ref(), "--show".as_ref(), bed.join("a.img").as_os_str()]).unwrap();
    let device = device.trim();
    let lines = ["mount DEV mnt", "mkdir DEV:/d", "cp a.img DEV:/", "subvolume create DEV:/s", "mkfs -q -f DEV"];
    let refusals: Vec<Output> = lines.iter().map(|line| bed.run(&line.replace("DEV", device))).collect();
    let read = [format!("mount -o ro {device} mnt"), "umount mnt".to_owned(), format!("cat -o ro {device}:/f")];
    let reads: Vec<Output> = read.iter().map(|line| bed.run(line)).collect();
    sh("losetup", ["-d", device]).unwrap();
    for output in &refusals {
        refused(output, &["is write-protected", "blockdev --setrw", "-o ro"]);
    }
    reads.iter().for_each(|output| drop(ok(output)));
}

#[test]
fn a_subvolume_that_stays_says_which_rule_keeps_it() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    for line in ["subvolume create a.img:/s", "subvolume create a.img:/t", "subvolume create a.img:/u"] {
        assert!(bed.run(line).status.success());
    }
    ok(bed.run("subvolume set-default a.img:/s"));
    let only = |output: &Output, words: &[&str]| {
        refused(output, words);
        let text = stderr(output);
        let guesses = ["default subvolume", "immutable", "users may not"];
        assert_eq!(guesses.iter().filter(|guess| text.contains(**guess)).count(), 1, "{text}");
    };
    only(&bed.run("subvolume delete -o subvolid=5 a.img:/s"), &["set-default"]);
    fs::set_permissions(bed.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
    ok(bed.run("mount -o subvolid=5 a.img mnt"));
    only(&bed.run("subvolume delete mnt/s"), &["set-default"]);
    ok(bed.run("subvolume set-default 5 mnt"));
    sh("chattr", ["+i".as_ref(), bed.join("mnt/t").as_os_str()]).unwrap();
    only(&bed.run("subvolume delete mnt/t"), &["chattr"]);
    sh("chattr", ["-i".as_ref(), bed.join("mnt/t").as_os_str()]).unwrap();
    chown(bed.join("mnt/u"), Some(4711), Some(4711)).unwrap();
    fs::set_permissions(bed.join("mnt"), fs::Permissions::from_mode(0o777)).unwrap();
    let as_user = |line: &str| bed.command(line).uid(4711).gid(4711).output().unwrap();
    only(&as_user("subvolume delete mnt/u"), &["user_subvol_rm_allowed"]);
    for line in ["subvolume delete mnt/s", "subvolume delete mnt/t"] {
        assert!(bed.run(line).status.success(), "{line}");
    }
    sh("chattr", ["+a".as_ref(), bed.join("mnt/u").as_os_str()]).unwrap();
    ok(bed.run("umount mnt"));
    // On an image, deleting an append-only subvolume is refused too.
    only(&bed.run("subvolume delete -o subvolid=5 a.img:/u"), &["chattr"]);
    ok(bed.run("check a.img"));
}

/// After a mount's server was killed, runs commands that take a path in the mount.
#[test]
fn a_mount_whose_server_has_ended_is_reported() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    assert!(bed.run("subvolume create a.img:/s").status.success());
    ok(bed.run("mount a.img mnt"));
    kill_process(bed.server(), Signal::KILL).unwrap();
    while fs::metadata(bed.join("mnt/f")).is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    for line in [
        "sync mnt",
        "filesystem sync mnt",
        "stats mnt",
        "mount a.img mnt",
        "subvolume create mnt/new",
        "subvolume list mnt",
        "subvolume show mnt",
        "subvolume get-default mnt",
        "subvolume set-default 5 mnt",
        "subvolume set-read-only mnt/s true",
        "subvolume snapshot mnt/s mnt/t",
        "subvolume delete mnt/s",
        "cp mnt/f a.img:/g",
        "import mnt/f a.img:/",
        "mkfs -q -r mnt b.img",
    ] {
        let output = bed.run(line);
        let text = stderr(&output);
        assert_ne!(output.status.code(), Some(0), "{line}");
        assert!(!text.contains("os error"), "{line}: {text}");
        assert!(text.contains("server has ended") && text.contains("ubtrfs umount"), "{line}: {text}");
        assert!(!bed.join("b.img").exists());
    }
    // umount unmounts, and its message contains no error number.
    let output = bed.run("umount mnt");
    assert!(!stderr(&output).contains("os error"), "{}", stderr(&output));
    assert!(fs::read_dir(bed.join("mnt")).unwrap().next().is_none());
    ok(bed.run("check a.img"));
    assert_eq!(ok(bed.run("cat a.img:/f")), "content");
}

#[test]
fn failures_name_the_filesystem_and_a_remedy_that_helps() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    let check = |place: &str| {
        for (line, words) in [
            ("balance start -dconvert=raid1", &["cannot start a balance of"][..]),
            ("inspect inode-resolve 9999", &["cannot find inode 9999 in", "no such inode"]),
            ("inspect subvolid-resolve 999", &["no such subvolume", "ubtrfs subvolume list"]),
            ("inspect logical-resolve 1", &["no data extent"]),
            ("subvolume delete -i 999", &["does not exist", "ubtrfs subvolume list"]),
            ("filesystem resize x:1G", &["'x' is not a device id", "ubtrfs filesystem show"]),
        ] {
            let output = bed.run(&format!("{line} {place}"));
            refused(&output, words);
            assert!(line.contains("resize") || stderr(&output).contains(place), "{line}: {}", stderr(&output));
        }
        for verb in ["pause", "resume", "cancel"] {
            let output = bed.run(&format!("balance {verb} {place}"));
            let named = format!("cannot {verb} the balance of {place}: ");
            assert!(output.status.code() == Some(2) && stderr(&output).contains(&named), "{}", stderr(&output));
        }
    };
    check("a.img");
    ok(bed.run("mount a.img mnt"));
    check("mnt");
    ok(bed.run("umount mnt"));
}

#[test]
fn a_user_without_a_name_is_told_why_fusermount_refuses() {
    if !kernel_oracle() || !fuse() || !Path::new("/usr/bin/fusermount3").exists() {
        return;
    }
    crate::common::let_users_mount();
    let bed = Bed::new();
    for name in ["a.img", "mnt", "."] {
        chown(bed.join(name), Some(54_321), Some(54_321)).unwrap();
    }
    let output = bed.command("mount a.img mnt").uid(54_321).gid(54_321).output().unwrap();
    refused(&output, &["54321", "/etc/passwd", "mount as root"]);
    ok(bed.run("mount a.img mnt"));
    ok(bed.run("umount mnt"));
}

#[test]
fn the_last_of_ro_and_rw_counts() {
    if !fuse() {
        return;
    }
    let bed = Bed::new();
    for (options, writable) in [
        ("-o ro,rw", true),
        ("-o rw,ro", false),
        ("-o ro -o rw", true),
        ("-o ro -o noatime", false),
        ("-r -o rw", false),
    ] {
        ok(bed.run(&format!("mount {options} a.img mnt")));
        assert_eq!(fs::write(bed.join("mnt/new"), options).is_ok(), writable, "{options}");
        ok(bed.run("umount mnt"));
    }
    ok(bed.run("check a.img"));
}

#[test]
fn options_that_contradict_each_other_or_are_too_little_are_refused() {
    let bed = Bed::new();
    for line in ["mount --sandbox --no-sandbox a.img mnt", "mount --no-sandbox --sandbox a.img mnt"] {
        refused(&bed.run(line), &["cannot be used with"]);
    }
    for line in ["mount -o memory=1 a.img mnt", "mount --memory 1M a.img mnt", "ls --memory 1 a.img"] {
        refused(&bed.run(line), &["at least 16M"]);
    }
    ok(bed.run("ls --memory 16M a.img"));
    if fuse() {
        ok(bed.run("mount -o memory=16M a.img mnt"));
        fs::write(bed.join("mnt/big"), vec![7; 40 << 20]).unwrap();
        ok(bed.run("umount mnt"));
        ok(bed.run("check --check-data-csum a.img"));
    }
}

#[test]
fn paths_in_a_mount_and_paths_without_a_slash_are_told_apart() {
    let bed = Bed::new();
    refused(&bed.run("import root/f a.img:relative"), &["a path in an image starts with a slash: a.img:/relative"]);
    refused(&bed.run("cat mnt"), &["write IMAGE:/path"]);
    if !fuse() {
        return;
    }
    ok(bed.run("mount a.img mnt"));
    for line in ["cat mnt/f", "stat mnt/f", "rm mnt/f", "mkdir mnt/new", "import root/f mnt"] {
        refused(&bed.run(line), &["is in a mount of ubtrfs", "IMAGE:/path", "programs of the system"]);
    }
    assert!(ok(bed.run("stats mnt/f")).contains("commit"), "a file of a mount stands for the mount");
    // Messages about a mounted image name the place.
    let at = bed.join("mnt").display().to_string();
    fs::create_dir(bed.join("other")).unwrap();
    for line in ["subvolume list a.img", "ls a.img:/", "check a.img", "mkfs -q -f a.img", "rescue super-recover a.img"]
    {
        if line == "check a.img" {
            let output = bed.run(line);
            assert!(stderr(&output).contains(&format!("has mounted it on {at}")), "{}", stderr(&output));
            continue;
        }
        refused(&bed.run(line), &["has mounted it on", &at, "ubtrfs umount"]);
    }
    refused(&bed.run("mount a.img mnt"), &["a.img is mounted on mnt already", "ubtrfs umount mnt"]);
    ok(bed.run("umount mnt"));
}

#[test]
fn the_command_that_has_an_image_open_is_named() {
    let bed = Bed::new();
    let script = "import fcntl,time; f=open('a.img'); fcntl.flock(f,fcntl.LOCK_EX); time.sleep(60)";
    let holder = Command::new("python3").args(["-c", script]).current_dir(bed.0.path()).spawn();
    let Ok(mut holder) = holder else { return };
    let pid = holder.id();
    let begun = std::time::Instant::now();
    while bed.run("ls a.img").status.success() {
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    for line in ["ls a.img", "mkdir a.img:/d", "mkfs -q -f a.img", "mount a.img mnt"] {
        let output = bed.run(line);
        refused(&output, &["a.img is in use by", &format!("pid {pid} (python3 -c import fcntl"), "wait until"]);
        assert!(!stderr(&output).contains("unmount"), "{}", stderr(&output));
    }
    holder.kill().unwrap();
    holder.wait().unwrap();
    ok(bed.run("mkdir a.img:/d"));
}

#[test]
fn the_top_level_cannot_be_deleted_and_no_remedy_says_so() {
    let bed = Bed::new();
    let check = |lines: &[&str]| {
        for line in lines {
            let output = bed.run(line);
            refused(&output, &["cannot delete", "top level (id 5)"]);
            assert!(!stderr(&output).contains("-o subvolid=5"), "{}", stderr(&output));
        }
    };
    check(&["subvolume delete a.img:/", "subvolume delete -i 5 a.img"]);
    if !fuse() {
        return;
    }
    ok(bed.run("mount a.img mnt"));
    check(&["subvolume delete mnt", "subvolume delete -i 5 mnt"]);
    assert!(bed.run("subvolume create mnt/s").status.success());
    ok(bed.run("umount mnt"));
    ok(bed.run("mount -o subvol=s a.img mnt"));
    refused(&bed.run("subvolume delete mnt"), &["is the root of the mount", "-o subvolid=5"]);
    ok(bed.run("umount mnt"));
    // The remedy works.
    ok(bed.run("mount -o subvolid=5 a.img mnt"));
    assert!(bed.run("subvolume delete mnt/s").status.success());
    ok(bed.run("umount mnt"));
}

#[test]
fn an_archive_with_a_path_that_is_too_long_is_refused() {
    let bed = Bed::new();
    let names = vec!["d".repeat(200); 25];
    let script = "import sys, tarfile\nwith tarfile.open('long.tar', 'w', format=tarfile.PAX_FORMAT) as tar:\n    \
                  tar.addfile(tarfile.TarInfo(sys.argv[1]))";
    let mut python = Command::new("python3");
    let made = python.args(["-c", script, &names.join("/")]).current_dir(bed.0.path()).status();
    if !made.is_ok_and(|status| status.success()) {
        return;
    }
    refused(&bed.run("import long.tar a.img:/"), &["long.tar: the archive has a path of more than 4096 bytes"]);
    assert_eq!(ok(bed.run("ls a.img")), "f\n");
}

#[test]
fn a_full_host_is_named_with_its_remedy() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    let host = bed.join("host");
    fs::create_dir(&host).unwrap();
    let options = ["-t", "tmpfs", "-o", "size=48M", "none"].map(std::ffi::OsStr::new);
    sh("mount", options.into_iter().chain([host.as_os_str()])).unwrap();
    ok(bed.run("mkfs -q -b 256M host/a.img"));
    ok(bed.run("mount host/a.img mnt"));
    let _ = fs::write(bed.join("mnt/big"), vec![7; 100 << 20]);
    refused(&bed.run("sync mnt"), &["No space left", "the disk that holds the image is full", "free space there"]);
    refused(&bed.run("umount mnt"), &["No space left", "the disk that holds the image is full", "free space there"]);
}

#[test]
fn the_disk_that_is_full_is_named_by_its_path() {
    let bed = Bed::new();
    refused(&bed.run("cp a.img:/f /dev/full"), &["cannot copy 'a.img:/f' to '/dev/full'", "No space left"]);
}

#[test]
fn a_directory_that_denies_a_new_image_is_named() {
    if !kernel_oracle() {
        return;
    }
    let bed = Bed::new();
    fs::create_dir(bed.join("ro")).unwrap();
    fs::set_permissions(bed.join("ro"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(bed.join("."), fs::Permissions::from_mode(0o755)).unwrap();
    let program = bed.join("ubtrfs");
    // A file that this process has written may not be executed while a child of another test inherits its descriptor.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ubtrfs")).arg(&program).status().unwrap().success());
    let mut command = Command::new(program);
    command.args(["mkfs", "-b", "100M", "ro/n.img"]).current_dir(bed.join(".")).uid(65534).gid(65534);
    refused(&command.output().unwrap(), &["no permission to make ro/n.img in the directory ro"]);
}

#[test]
fn the_owner_of_a_source_is_told_apart_from_the_owner_of_its_snapshot() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    fs::set_permissions(bed.join("."), fs::Permissions::from_mode(0o755)).unwrap();
    let program = bed.join("ubtrfs");
    // A file that this process has written may not be executed while a child of another test inherits its descriptor.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ubtrfs")).arg(&program).status().unwrap().success());
    ok(bed.run("subvolume create a.img:/s"));
    ok(bed.run("mount a.img mnt"));
    fs::create_dir(bed.join("mnt/open")).unwrap();
    fs::set_permissions(bed.join("mnt/open"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(program);
    command.args(["subvolume", "snapshot", "mnt/s", "mnt/open/snap"]).current_dir(bed.join(".")).uid(65534).gid(65534);
    refused(&command.output().unwrap(), &["cannot make mnt/open/snap: mnt/s belongs to another user"]);
    ok(bed.run("umount mnt"));
}

#[test]
fn a_missing_device_is_never_answered_with_advice_to_format() {
    let bed = Bed::new();
    for line in ["check nope", "mount nope mnt", "ls nope", "inspect dump-super nope", "mkfs nope"] {
        let output = bed.run(line);
        assert!(stderr(&output).contains("nope does not exist; check the path"), "{line}: {}", stderr(&output));
        assert!(!stderr(&output).contains("mkfs -b") || line == "mkfs nope", "{line}: {}", stderr(&output));
    }
    for tag in ["UUID=1234", "LABEL=backup", "PARTUUID=5", "PARTLABEL=x"] {
        refused(&bed.run(&format!("mount {tag} mnt")), &["name the device", &format!("blkid -o device -t {tag}")]);
    }
}

/// As in btrfs-progs, `-h` of commands that print sizes is an option for the unit.
#[test]
fn h_asks_for_readable_sizes_where_sizes_are_printed() {
    let bed = Bed::new();
    for line in ["filesystem df", "filesystem usage", "filesystem du", "subvolume show"] {
        let at = if line.starts_with("filesystem d") || line.contains("usage") { "a.img" } else { "a.img:/" };
        let at = if line == "filesystem du" { "a.img:/f" } else { at };
        let (short, long) = (bed.run(&format!("{line} -h {at}")), bed.run(&format!("{line} --human-readable {at}")));
        assert_eq!(ok(short), ok(long), "{line}");
        let raw = ok(bed.run(&format!("{line} -b {at}")));
        assert_eq!(ok(bed.run(&format!("{line} -b -h {at}"))), ok(bed.run(&format!("{line} {at}"))), "{line}: {raw}");
        assert!(ok(bed.run(&format!("{line} --help"))).contains("Usage:"), "{line}");
    }
    ok(bed.run("quota enable a.img"));
    assert_eq!(ok(bed.run("qgroup show -h a.img")), ok(bed.run("qgroup show a.img")));
}

#[test]
fn an_unknown_command_is_answered_with_the_one_that_was_meant() {
    let bed = Bed::new();
    for (line, tip) in [
        ("restore a.img .", "ubtrfs cp -r IMAGE:/PATH"),
        ("filesytem df mnt", "did you mean: ubtrfs filesystem\n"),
        ("df mnt", "did you mean: ubtrfs filesystem df\n"),
        ("snapshot mnt mnt/s", "did you mean: ubtrfs subvolume snapshot\n"),
        ("subvolume lsit mnt", "did you mean: ubtrfs subvolume list\n"),
    ] {
        let said = stderr(&bed.run(line));
        assert!(said.contains(tip) && said.matches("tip:").count() == 1, "{line}: {said}");
    }
    for line in ["frobnicate", "resq", "reset", "subvolume frobnicate"] {
        let said = stderr(&bed.run(line));
        assert!(said.contains("unrecognized subcommand") && !said.contains("tip:"), "{line}: {said}");
    }
}

#[test]
fn damage_that_prevents_opening_is_answered_with_check() {
    let bed = Bed::new();
    // Tree blocks, but neither the superblock nor the system chunks in it, are overwritten.
    let image = fs::File::options().write(true).open(bed.join("a.img")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &vec![0; 50 << 20], 1 << 20).unwrap();
    for line in ["mount a.img mnt", "ls a.img:/"] {
        refused(
            &bed.run(line),
            &[
                "corrupt",
                "; copy the image; to find the damage, run: ubtrfs check a.img; to read what is left, use: -o ro,rescue=all\n",
            ],
        );
    }
    let checked = bed.run("check a.img");
    assert_eq!(checked.status.code(), Some(1));
}

#[test]
fn advice_to_list_subvolumes_names_the_filesystem() {
    let bed = Bed::new();
    for line in
        ["subvolume show a.img:/f", "send a.img:/f", "subvolume delete -i 999 a.img", "ls -o subvol=none a.img:/"]
    {
        let said = stderr(&bed.run(line));
        let advised =
            said.trim_end().rsplit_once("list them with: ubtrfs ").unwrap_or_else(|| panic!("{line}: {said}"));
        ok(bed.run(advised.1));
    }
    for line in ["qgroup show a.img", "qgroup create 1/1 a.img"] {
        refused(&bed.run(line), &["quotas are disabled; enable them with: ubtrfs quota enable a.img\n"]);
    }
}

#[test]
fn a_path_in_an_image_without_its_first_slash_is_called_so() {
    let bed = Bed::new();
    for line in ["ls a.img:none", "cat a.img:f", "stat a.img:f", "rm a.img:f", "send a.img:f", "subvolume show a.img:f"]
    {
        let path = line.split(' ').next_back().unwrap().replace(':', ":/");
        refused(&bed.run(line), &[&format!("a path in an image starts with a slash: {path}")]);
    }
    refused(&bed.run("cat a.img"), &["'a.img' names no file in an image; write IMAGE:/path, for example a.img:/"]);
}

#[test]
fn an_archive_is_unpacked_into_an_image_that_is_named_alone() {
    let bed = Bed::new();
    fs::write(bed.join("new"), "from the archive").unwrap();
    sh("tar", ["-C".as_ref(), bed.0.path().as_os_str(), "-cf".as_ref(), bed.join("t.tar").as_os_str(), "new".as_ref()])
        .unwrap();
    ok(bed.run("import t.tar a.img"));
    assert_eq!(ok(bed.run("cat a.img:/new")), "from the archive");
}

#[test]
fn operands_in_the_wrong_order_are_answered_with_the_right_one() {
    let bed = Bed::new();
    sh(
        "tar",
        ["-C".as_ref(), bed.0.path().as_os_str(), "-cf".as_ref(), bed.join("x.tar").as_os_str(), "root".as_ref()],
    )
    .unwrap();
    let right = "ubtrfs import x.tar a.img:/";
    refused(&bed.run("import a.img:/ x.tar"), &["the archive is named first", right]);
    ok(bed.run(&right[7..]));
    let right = "ubtrfs cp -a a.img:/f out";
    refused(&bed.run("mv a.img:/f out"), &["out is in no image", right]);
    ok(bed.run(&right[7..]));
    assert!(bed.join("out").exists());
    ok(bed.run("subvolume create a.img:/s"));
    let right = "ubtrfs subvolume delete -i 256 a.img";
    let refused_both = bed.run("subvolume delete 256 a.img");
    refused(&refused_both, &["256 does not exist", right]);
    ok(bed.run(&right[7..]));
}

#[test]
fn an_image_alone_is_its_root_directory() {
    let bed = Bed::new();
    ok(bed.run("property set a.img label name"));
    assert!(ok(bed.run("property get a.img")).contains("label=name"));
    assert!(ok(bed.run("property list a.img")).contains("ro "));
    assert!(ok(bed.run("subvolume show a.img")).contains("UUID:"));
}

#[test]
fn a_path_in_an_image_and_a_directory_too_large_for_it_are_answered_with_a_remedy() {
    let bed = Bed::new();
    refused(&bed.run("inspect map a.img:/etc"), &["a.img:/etc is a path in an image", "takes the image: a.img"]);
    fs::create_dir(bed.join("tree")).unwrap();
    fs::write(bed.join("tree/big"), vec![1; 80 << 20]).unwrap();
    refused(
        &bed.run("mkfs -q -b 64M -r tree small.img"),
        &["no space left; give a larger size with -b, or leave -b out"],
    );
}

#[test]
fn a_full_image_and_a_group_with_members_are_answered_with_a_remedy() {
    let bed = Bed::new();
    ok(bed.run("mkfs -q -b 64M small.img"));
    fs::write(bed.join("big"), vec![1; 80 << 20]).unwrap();
    refused(
        &bed.run("cp big small.img:/"),
        &["no space left; remove files, or make the filesystem larger: ubtrfs filesystem resize"],
    );
    ok(bed.run("filesystem resize +128M small.img"));
    ok(bed.run("cp big small.img:/"));
    ok(bed.run("subvolume create a.img:/s"));
    ok(bed.run("quota enable a.img"));
    ok(bed.run("qgroup create 1/0 a.img"));
    ok(bed.run("qgroup assign 0/256 1/0 a.img"));
    let remedy = "ubtrfs qgroup remove 0/256 1/0 PATH";
    refused(&bed.run("qgroup destroy 1/0 a.img"), &["has members", remedy]);
    ok(bed.run(&remedy[7..].replace("PATH", "a.img")));
    ok(bed.run("qgroup destroy 1/0 a.img"));
    refused(&bed.run("setfattr -n foo -v bar a.img:/f"), &["foo", "user."]);
}

#[test]
fn temporary_names_do_not_appear_in_messages() {
    if !kernel_oracle() {
        return;
    }
    let bed = Bed::new();
    let host = bed.join("host");
    fs::create_dir(&host).unwrap();
    fs::create_dir(bed.join("large")).unwrap();
    fs::write(bed.join("large/f"), vec![b'x'; 150 << 20]).unwrap();
    sh(
        "mount",
        ["-t".as_ref(), "tmpfs".as_ref(), "-o".as_ref(), "size=8M".as_ref(), "none".as_ref(), host.as_os_str()],
    )
    .unwrap();
    let output = bed.run("mkfs -q -b 300M -r large host/new.img");
    refused(&output, &["'host/new.img:/f'", "No space left"]);
    assert!(!stderr(&output).contains(".ubtrfs-"), "{}", stderr(&output));
    assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
}

#[test]
fn sizes_in_advice_are_written_as_options_take_them() {
    let bed = Bed::new();
    let output = bed.run("mkfs -q -b 10M b.img");
    let said = stderr(&output);
    let size = said.split("needs at least ").nth(1).and_then(|rest| rest.split(';').next()).unwrap().to_owned();
    assert!(size.ends_with('M'), "{said}");
    ok(bed.run(&format!("mkfs -q -b {size} b.img")));
}

#[test]
fn check_explains_its_codes_itself() {
    let bed = Bed::new();
    assert_eq!(
        ok(bed.run("check --explain e-block-csum")),
        "E-BLOCK-CSUM: No copy of a tree block has a correct checksum.\n"
    );
    let all = ok(bed.run("check --explain"));
    assert!(all.lines().count() > 50 && all.lines().all(|line| line.contains(": ")), "{all}");
    let wrong = bed.run("check --explain E-NOTHING");
    assert!(stderr(&wrong).contains("ubtrfs check --explain\n") && wrong.status.code() == Some(2), "{wrong:?}");
}
