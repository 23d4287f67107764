//! Tests of the mount from the command line down to the disk, judged by Linux.
//!
//! Method: the built program mounts an image, plain system calls (or the reference model's random operations) change
//! it, and the program unmounts. Then `btrfs check` must be clean, and Linux's own mount must show the written data.
//! Without /dev/fuse or the kernel's btrfs, the tests say that they skip; with CI=true they fail.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{NOBODY, namespace, server_of};
use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_testkit::{
    Compare, Driver, Image, KernelImage, KernelImageSpec, LoopMount, Model, PathTarget, Rng, btrfs_check, capability,
    compare_entries, run as sh, walk_path,
};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle()
}

/// Runs the program, and waits for its end without a time limit.
fn ubtrfs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    Command::new(UBTRFS).args(args).env("LC_ALL", "C").output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, text(output));
}

/// An image mounted by the program; unmounted on drop, also if the test panics.
struct Mount {
    dir: TempDir,
    mounted: bool,
}

impl Mount {
    fn new(image: &Path, options: &[&str]) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-mount-").unwrap();
        let mut args: Vec<&OsStr> = vec!["mount".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.extend([image.as_os_str(), dir.path().as_os_str()]);
        ok(&ubtrfs(args));
        Self { dir, mounted: true }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    fn umount(mut self) {
        self.mounted = false;
        ok(&ubtrfs(["umount".as_ref(), self.path().as_os_str()]));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = ubtrfs(["umount".as_ref(), "-l".as_ref(), self.path().as_os_str()]);
        }
    }
}

#[test]
fn linux_reads_files_written_through_the_mount() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    fs::create_dir(mount.join("dir")).unwrap();
    fs::write(mount.join("dir/small"), b"hello").unwrap();
    let big: Vec<u8> = Rng::new(1).bytes(5_000_000);
    fs::write(mount.join("big"), &big).unwrap();
    symlink("dir/small", mount.join("link")).unwrap();
    fs::hard_link(mount.join("big"), mount.join("dir/hard")).unwrap();
    fs::set_permissions(mount.join("big"), fs::Permissions::from_mode(0o4751)).unwrap();
    let sparse = fs::File::create(mount.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 1 << 40).unwrap();
    drop(sparse);
    fs::rename(mount.join("dir/small"), mount.join("dir/renamed")).unwrap();
    let ours = walk_path(mount.path()).unwrap();
    mount.umount();

    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    compare_entries(&ours, &walk_path(theirs.path()).unwrap(), Compare::ALL).unwrap();
    assert_eq!(fs::read(theirs.join("dir/hard")).unwrap(), big);
    theirs.close().unwrap();
}

#[test]
fn random_operations_end_as_the_model_says_and_linux_agrees() {
    if !ready() {
        return;
    }
    let seed = Rng::seed_or(20261121);
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let mut model = Model::new();
    let mut target = PathTarget::new(mount.path());
    Driver::new(seed, 300_000).run(&mut model, &mut target, 3000).unwrap();
    compare_entries(&model.entries(), &walk_path(mount.path()).unwrap(), Compare::MODEL).unwrap();
    mount.umount();

    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "").unwrap();
    compare_entries(&model.entries(), &walk_path(theirs.path()).unwrap(), Compare::MODEL).unwrap();
    theirs.scrub().unwrap();
    theirs.close().unwrap();
}

#[test]
fn a_filesystem_that_linux_filled_reads_equal() {
    if !ready() {
        return;
    }
    let made = KernelImage::rich(KernelImageSpec::DEFAULT, 7).unwrap();
    let theirs = LoopMount::new(made.image.path(), "ro").unwrap();
    let expected = walk_path(theirs.path()).unwrap();
    theirs.close().unwrap();
    let mount = Mount::new(made.image.path(), &["-r"]);
    compare_entries(&expected, &walk_path(mount.path()).unwrap(), Compare::ALL).unwrap();
    let error = fs::write(mount.join("new"), b"x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::ROFS.raw_os_error()), "EROFS on a read-only mount: {error}");
    mount.umount();
}

#[test]
fn umount_returns_when_the_image_is_free_and_complete() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    for round in 0..5 {
        let mount = Mount::new(image.path(), &[]);
        for file in 0..200 {
            fs::write(mount.join(&format!("{round}-{file}")), vec![round; 3000]).unwrap();
        }
        mount.umount();
        btrfs_check(image.path()).unwrap();
        let theirs = LoopMount::new(image.path(), "ro").unwrap();
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 200 * (usize::from(round) + 1));
        theirs.close().unwrap();
    }
}

#[test]
fn synced_files_survive_a_killed_server() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    fs::write(mount.join("synced"), vec![1; 100_000]).unwrap();
    ok(&ubtrfs(["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]));
    fs::write(mount.join("lost"), vec![2; 100_000]).unwrap();
    let server = server_of(mount.path());
    ok(&Command::new("kill").args(["-9", &server.to_string()]).output().unwrap());
    // The server is gone, so unmounting reports that changes may be lost.
    let output = ubtrfs(["umount".as_ref(), mount.path().as_os_str()]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("last commit is intact"), "{}", text(&output));
    drop(mount);
    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    assert_eq!(fs::read(theirs.join("synced")).unwrap(), vec![1; 100_000]);
    theirs.close().unwrap();
}

#[test]
fn fsync_is_durable_when_it_returns() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = fs::File::create(mount.join("file")).unwrap();
    file.write_all_at(&[7; 70_000], 0).unwrap();
    file.sync_all().unwrap();
    let server = server_of(mount.path());
    ok(&Command::new("kill").args(["-9", &server.to_string()]).output().unwrap());
    drop(file);
    drop(mount);
    let theirs = LoopMount::new(image.path(), "").unwrap();
    assert_eq!(fs::read(theirs.join("file")).unwrap(), vec![7; 70_000]);
    theirs.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn an_unlinked_open_file_lives_until_it_is_closed() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = fs::File::options().read(true).write(true).create_new(true).open(mount.join("f")).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    fs::remove_file(mount.join("f")).unwrap();
    file.write_all_at(&[9; 100_000], 6).unwrap();
    file.sync_all().unwrap();
    let mut buf = [0; 6];
    file.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(&buf, b"before");
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    drop(file);
    mount.umount();
    // `btrfs check` would report an orphan that was left behind.
    btrfs_check(image.path()).unwrap();
}

/// Checks that the program failed with status 1 and one line on stderr that contains these words.
fn assert_one_line(output: &Output, words: &[&str]) {
    let said = text(output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    assert!(said.starts_with("ubtrfs: "), "{said}");
    for word in words {
        assert!(said.contains(word), "'{word}' in: {said}");
    }
}

#[test]
fn a_refused_mount_prints_one_line_and_changes_nothing() {
    if !capability::fuse() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let point = dir.path().join("point");
    fs::create_dir(&point).unwrap();
    let mount = |device: &Path, at: &Path| ubtrfs(["mount".as_ref(), device.as_os_str(), at.as_os_str()]);
    assert_one_line(&mount(&dir.path().join("missing"), &point), &["missing"]);

    let zeros = Image::empty(200 << 20).unwrap();
    let before = zeros.digest().unwrap();
    assert_one_line(&mount(zeros.path(), &point), &[]);
    assert_eq!(zeros.digest().unwrap(), before);
    assert_one_line(&mount(zeros.path(), &dir.path().join("nowhere")), &["mkdir"]);
    assert_one_line(&mount(zeros.path(), zeros.path()), &["not a directory"]);
    assert_one_line(&mount(zeros.path(), dir.path()), &["not empty", "nonempty"]);
    let option = ["mount".as_ref(), "-o".as_ref(), "frob=1".as_ref(), zeros.path().as_os_str(), point.as_os_str()];
    assert_one_line(&ubtrfs(option), &["frob=1"]);
    assert_one_line(&ubtrfs(["umount".as_ref(), point.as_os_str()]), &["is not a mount"]);
    assert_one_line(&ubtrfs(["sync".as_ref(), point.as_os_str()]), &[]);
    assert_eq!(zeros.digest().unwrap(), before);
}

#[test]
fn without_fusermount_a_user_hears_what_to_install() {
    if !ready() || !capability::program("setpriv") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let world = UserWorld::new(image.path());
    // Run in a mount namespace in which the helper is hidden.
    let script = format!(
        "for f in /usr/bin /bin; do [ -e $f/fusermount3 ] && mount --bind /dev/null $f/fusermount3; done; exec {}",
        world.command(&["mount", "image", "point"])
    );
    let output = namespace(&world.dir.path().join("point")).args(["sh", "-c", &script]).output().unwrap();
    assert_one_line(&output, &["fuse"]);
}

/// Everything that an ordinary user needs: the program, and the user's image and mount point.
struct UserWorld {
    dir: TempDir,
}

impl UserWorld {
    /// The user nobody, because fusermount3 needs a user with a name.
    const UID: u32 = 65534;

    fn new(image: &Path) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-user-").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::copy(UBTRFS, dir.path().join("ubtrfs")).unwrap();
        fs::copy(image, dir.path().join("image")).unwrap();
        fs::create_dir(dir.path().join("point")).unwrap();
        for name in ["", "image", "point"] {
            std::os::unix::fs::chown(dir.path().join(name), Some(Self::UID), Some(Self::UID)).unwrap();
        }
        Self { dir }
    }

    /// Makes a shell command that runs the program as the user in this directory.
    fn command(&self, args: &[&str]) -> String {
        let (dir, uid) = (self.dir.path().display(), Self::UID);
        format!(
            "env -C {dir} setpriv --reuid={uid} --regid={uid} --clear-groups --inh-caps=-all {dir}/ubtrfs {}",
            args.join(" ")
        )
    }

    fn run(&self, command: &str) -> Output {
        Command::new("sh").args(["-c", command]).output().unwrap()
    }

    /// Runs a shell command as the user.
    fn shell(&self, script: &str) -> Output {
        let uid = Self::UID.to_string();
        Command::new("setpriv")
            .args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups", "--inh-caps=-all"])
            .args(["sh", "-ec", script])
            .current_dir(self.dir.path())
            .output()
            .unwrap()
    }
}

#[test]
fn an_ordinary_user_makes_mounts_and_fills_an_image() {
    if !ready() || !capability::program("setpriv") || !capability::program("fusermount3") {
        return;
    }
    crate::common::let_users_mount();
    let empty = Image::empty(4096).unwrap();
    let world = UserWorld::new(empty.path());
    ok(&world.run(&world.command(&["mount", "--create", "200M", "mine", "point"])));
    let filled =
        world.shell("mkdir point/dir; seq 10000 > point/dir/numbers; echo hello > point/file; ln point/file point/other; ls -la point");
    let synced = world.run(&world.command(&["sync", "point"]));
    let closed = world.run(&world.command(&["umount", "point"]));
    ok(&filled);
    ok(&synced);
    ok(&closed);
    let image = world.dir.path().join("mine");
    btrfs_check(&image).unwrap();
    let theirs = LoopMount::new(&image, "ro").unwrap();
    assert_eq!(fs::read(theirs.join("other")).unwrap(), b"hello\n");
    assert_eq!(fs::metadata(theirs.join("file")).unwrap().uid(), UserWorld::UID);
    theirs.close().unwrap();
}

#[test]
fn mount_and_umount_of_the_system_work() {
    if !ready() || !capability::program("mount.fuse3") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let dir = TempDir::new().unwrap();
    // `mount -t fuse.ubtrfs` runs `mount.fuse3`, which takes the program's name from the type (the part after the dot:
    // `ubtrfs`) and searches PATH for the program. The test does not run mount(8) itself, because mount(8) uses the
    // system's PATH, where the program may not be installed.
    let path = format!("{}:{}", Path::new(UBTRFS).parent().unwrap().display(), std::env::var("PATH").unwrap());
    let output = Command::new("/usr/sbin/mount.fuse3")
        .args([image.path(), dir.path()])
        .args(["-o", "noatime,nodev,compress=zstd:3", "-t", "fuse.ubtrfs"])
        .env("PATH", path)
        .output()
        .unwrap();
    ok(&output);
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = table.lines().find(|line| line.contains(&*dir.path().to_string_lossy())).unwrap().to_owned();
    fs::write(dir.path().join("file"), vec![b'a'; 1 << 20]).unwrap();
    ok(&ubtrfs(["umount".as_ref(), dir.path().as_os_str()]));
    for word in ["fuse.ubtrfs", "nodev", "noatime", "allow_other", "default_permissions"] {
        assert!(line.contains(word), "'{word}' in: {line}");
    }
    assert!(line.starts_with(&*image.path().to_string_lossy()), "{line}");
    btrfs_check(image.path()).unwrap();
}

#[test]
fn sigterm_unmounts_and_commits() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let dir = TempDir::new().unwrap();
    let mut server = Command::new(UBTRFS)
        .args(["mount".as_ref(), "-f".as_ref(), image.path().as_os_str(), dir.path().as_os_str()])
        .spawn()
        .unwrap();
    let file = dir.path().join("file");
    for _ in 0..200 {
        if fs::metadata(dir.path()).is_ok_and(|metadata| metadata.ino() == 256) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    fs::write(&file, b"content").unwrap();
    ok(&Command::new("kill").arg(server.id().to_string()).output().unwrap());
    let status = server.wait().unwrap();
    assert!(status.success(), "{status}");
    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    assert_eq!(fs::read(theirs.join("file")).unwrap(), b"content");
    theirs.close().unwrap();
}

#[test]
fn a_write_that_does_not_fit_fails_when_it_is_made() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = fs::File::create(mount.join("full")).unwrap();
    let chunk = vec![5; 1 << 20];
    let mut taken = 0;
    let error = loop {
        match file.write_at(&chunk, taken) {
            Ok(len) => taken += len as u64,
            Err(error) => break error,
        }
        assert!(taken < 256 << 20, "more was taken than there is");
    };
    assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()), "ENOSPC: {error}");
    // All data that was written before the error is kept.
    file.sync_all().unwrap();
    drop(file);
    mount.umount();
    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    let kept = fs::read(theirs.join("full")).unwrap();
    assert_eq!(kept.len() as u64, taken);
    assert!(kept.iter().all(|&byte| byte == 5));
    theirs.close().unwrap();
    let mount = Mount::new(image.path(), &[]);
    fs::remove_file(mount.join("full")).unwrap();
    fs::write(mount.join("after"), &chunk).unwrap();
    mount.umount();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn times_at_the_ends_of_their_range_do_not_end_the_server() {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = mount.join("file");
    fs::write(&file, b"x").unwrap();
    for (tv_sec, tv_nsec) in [(i64::MIN, 5), (i64::MIN, 0), (i64::MAX, 999_999_999), (-2, 800_000_000), (1 << 33, 1)] {
        let time = Timespec { tv_sec, tv_nsec };
        utimensat(CWD, &file, &Timestamps { last_access: time, last_modification: time }, AtFlags::empty()).unwrap();
        let metadata = fs::metadata(&file).unwrap();
        assert_eq!(metadata.mtime(), tv_sec);
        // Linux sets the nanoseconds to 0 if the seconds are the smallest or the largest possible.
        if tv_sec != i64::MIN && tv_sec != i64::MAX {
            assert_eq!(metadata.mtime_nsec(), tv_nsec);
        }
    }
    fs::write(mount.join("alive"), b"y").unwrap();
    mount.umount();
    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    assert_eq!(fs::metadata(theirs.join("file")).unwrap().mtime(), 1 << 33);
    theirs.close().unwrap();
}

#[test]
fn changes_by_the_server_are_visible_at_once() {
    if !ready() || !capability::program("setpriv") || !capability::program("chattr") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = mount.join("file");
    fs::write(&file, b"content").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o6777);
    let script = format!("echo more >> {}", file.display());
    ok(&Command::new(NOBODY[0]).args(&NOBODY[1..]).args(["sh", "-c", &script]).output().unwrap());
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o777, "a user's write takes privileges away");

    let before = fs::metadata(&file).unwrap();
    ok(&Command::new("chattr").arg("+A").arg(&file).output().unwrap());
    let after = fs::metadata(&file).unwrap();
    assert_ne!((before.ctime(), before.ctime_nsec()), (after.ctime(), after.ctime_nsec()), "flags change ctime");
    mount.umount();
}

#[test]
fn remounting_read_only_and_back() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let remount = |how: &str| {
        let option = format!("remount,{how}");
        let words = ["mount".as_ref(), "-o".as_ref(), OsStr::new(&option), image.path().as_os_str()];
        ok(&ubtrfs(words.into_iter().chain([mount.path().as_os_str()])));
    };
    remount("ro");
    assert_eq!(fs::write(mount.join("a"), b"a").unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    remount("rw");
    fs::write(mount.join("a"), b"a").unwrap();
    remount("ro,noexec");
    remount("rw");
    let table = fs::read_to_string("/proc/mounts").unwrap();
    let line = table.lines().find(|line| line.contains(mount.path().to_str().unwrap())).unwrap();
    assert!(line.contains("noexec") && line.contains("rw,"), "flags that are not named stay: {line}");
    // For a remount, mount(8) passes the options that /proc/mounts shows, so these options must be accepted.
    let shown = line.split(' ').nth(3).unwrap();
    remount(&format!("{shown},ro"));
    remount(&format!("{shown},exec"));
    // The same is true for the options of /etc/fstab, as the mount was made with them.
    mount.umount();
    let fstab = "noatime,compress=zstd:3,commit=5,x-systemd.automount";
    let mount = Mount::new(image.path(), &["-o", fstab, "--memory=200M"]);
    let remount = |how: &str| {
        let option = format!("remount,{how}");
        let words = ["mount".as_ref(), "-o".as_ref(), OsStr::new(&option), image.path().as_os_str()];
        ok(&ubtrfs(words.into_iter().chain([mount.path().as_os_str()])));
    };
    remount(&format!("{fstab},ro"));
    assert_eq!(fs::write(mount.join("a"), b"a").unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    remount(&format!("{fstab},memory=200M,max_inline=2k,rw"));
    fs::write(mount.join("a"), b"a").unwrap();
    let refused = |options: &str, device: &OsStr, words: &[&str]| {
        let options = format!("remount,{options}");
        let words_of = ["mount".as_ref(), "-o".as_ref(), OsStr::new(&options), device, mount.path().as_os_str()];
        assert_one_line(&ubtrfs(words_of), words);
    };
    let device = image.path().as_os_str();
    refused("commit=5,max_inline=4", device, &["'max_inline=4' cannot change"]);
    refused("notreelog", device, &["notreelog", "unmount", "mount it again"]);
    refused("compress=best", device, &["compress=best"]);
    refused("ro,subvol=a", device, &["subvol=a", "unmount", "mount it again"]);
    refused("ro", OsStr::new("/nonexistent"), &["is mounted on", "/nonexistent"]);
    fs::write(mount.join("a"), b"still writable").unwrap();
    mount.umount();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_remount_changes_how_new_data_is_written() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(400 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let remount = |options: &str| {
        let option = format!("remount,{options}");
        let words = ["mount".as_ref(), "-o".as_ref(), OsStr::new(&option), image.path().as_os_str()];
        ok(&ubtrfs(words.into_iter().chain([mount.path().as_os_str()])));
    };
    // Whether the data of a new file is compressed, and whether it is overwritten in place.
    let written = |name: &str| {
        let path = mount.join(name);
        fs::write(&path, vec![b'x'; 4 << 20]).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        let extents = ubtrfs(["filesystem".as_ref(), "fiemap".as_ref(), path.as_os_str()]);
        ok(&extents);
        let flags = sh("lsattr", ["-d".as_ref(), path.as_os_str()]).unwrap();
        (text(&extents).contains("encoded"), flags.split(' ').next().unwrap().contains('C'))
    };
    assert_eq!(written("plain"), (false, false));
    remount("compress=zstd");
    assert_eq!(written("compressed"), (true, false));
    remount("nodatacow");
    assert_eq!(written("in-place"), (false, true));
    remount("datasum,compress-force=lzo,commit=5");
    assert_eq!(written("again"), (true, false));
    remount("compress=no");
    assert_eq!(written("last"), (false, false));
    mount.umount();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_mount_that_was_opened_read_only_does_not_become_writable() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &["-o", "ro"]);
    let words = ["mount".as_ref(), "-o".as_ref(), "remount,rw".as_ref(), image.path().as_os_str()];
    let output = ubtrfs(words.into_iter().chain([mount.path().as_os_str()]));
    assert_one_line(&output, &["opened read-only", "without ro"]);
    assert_eq!(fs::write(mount.join("a"), b"a").unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    mount.umount();
}

#[test]
fn a_remount_tells_of_a_flag_that_the_server_does_not_follow() {
    if !ready() || !capability::root() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &["-o", "ro"]);
    // mount(8) without a type calls no helper: it sets the kernel's flag alone.
    ok(&Command::new("mount").args(["-i", "-o", "remount,rw"]).arg(mount.path()).output().unwrap());
    let words = ["mount".as_ref(), "-o".as_ref(), "remount,rw".as_ref(), image.path().as_os_str()];
    let output = ubtrfs(words.into_iter().chain([mount.path().as_os_str()]));
    assert_one_line(&output, &["opened read-only", "without ro"]);
    mount.umount();
}

#[test]
fn a_directory_that_is_renamed_into_while_it_is_read_has_an_end() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let dir = mount.join("dir");
    fs::create_dir(&dir).unwrap();
    for n in 0..2000 {
        fs::write(dir.join(n.to_string()), b"").unwrap();
    }
    let mut seen = 0;
    for entry in fs::read_dir(&dir).unwrap() {
        seen += 1;
        assert!(seen <= 4000, "no end");
        let path = entry.unwrap().path();
        fs::rename(&path, dir.join("renamed")).unwrap();
        fs::rename(dir.join("renamed"), &path).unwrap();
    }
    assert_eq!(seen, 2000);
    mount.umount();
}

#[test]
fn set_group_id_goes_with_a_change_by_one_who_is_not_of_the_group() {
    if !ready() || !capability::program("setpriv") || !capability::program("setfacl") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let file = mount.join("file");
    fs::write(&file, b"content").unwrap();
    std::os::unix::fs::chown(&file, Some(65534), Some(1234)).unwrap();
    let mode_after = |groups: &str, script: &str| {
        fs::set_permissions(&file, fs::Permissions::from_mode(0o2767)).unwrap();
        let user = ["--reuid=65534", "--regid=65534", groups, "--inh-caps=-all", "sh", "-c"];
        ok(&Command::new("setpriv").args(user).arg(format!("{script} {}", file.display())).output().unwrap());
        fs::metadata(&file).unwrap().mode() & 0o7777
    };
    assert_eq!(mode_after("--groups=1234", "setfacl -m u::rwx,g::r,o::rwx"), 0o2747);
    assert_eq!(mode_after("--clear-groups", "setfacl -m u::rwx,g::r,o::rwx"), 0o747);
    assert_eq!(mode_after("--groups=1234", "fallocate -l 8192"), 0o2767);
    assert_eq!(mode_after("--clear-groups", "fallocate -l 8192"), 0o767);
    mount.umount();
}

/// If only root may enter a mount, the kernel does not check permissions, which saves a request for every file that
/// root makes or removes. In all other respects, such a mount behaves as any other mount.
#[test]
fn roots_own_mount_works_without_permission_checks() {
    if !ready() || !capability::program("setpriv") || !capability::program("setfacl") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let options_of = |mount: &Mount| {
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        table.lines().find(|line| line.contains(&*mount.path().to_string_lossy())).unwrap().to_owned()
    };
    let mount = Mount::new(image.path(), &["-o", "noallow_other,default_permissions"]);
    assert!(options_of(&mount).contains("default_permissions"));
    mount.umount();

    let mount = Mount::new(image.path(), &["-o", "noallow_other"]);
    assert!(!options_of(&mount).contains("default_permissions") && !options_of(&mount).contains("allow_other"));
    let (dir, file) = (mount.join("dir"), mount.join("dir/file"));
    fs::create_dir(&dir).unwrap();
    let sh = |script: &str| {
        let output =
            Command::new("sh").args(["-c", &format!("cd {}; {script}", mount.path().display())]).output().unwrap();
        ok(&output);
        text(&output)
    };
    sh(
        "umask 027; echo content > dir/file; mkdir dir/below; chown 1234:1234 dir dir/file; chmod 0 dir dir/file; echo more >> dir/file",
    );
    assert_eq!(fs::read(&file).unwrap(), b"content\nmore\n");
    assert_eq!(fs::metadata(mount.join("dir/below")).unwrap().mode() & 0o7777, 0o750);
    sh(
        "setfacl -m u:1234:rw dir/file; chmod 640 dir/file; setfacl -d -m u:1234:rwx dir/below; umask 077; echo x > dir/below/new",
    );
    let acl = sh("getfacl -cn dir/file");
    assert!(acl.contains("user:1234:rw-") && acl.contains("mask::r--"), "{acl}");
    assert!(sh("getfacl -cn dir/below/new").contains("user:1234:rwx"), "the directory's default");
    sh(
        "cp /bin/true dir/below/program; chmod 644 dir/below/program; ! dir/below/program 2>&1; chmod 755 dir/below/program; dir/below/program",
    );
    sh(
        "chmod 4755 dir/below/program; echo >> dir/below/program; rm dir/below/new; rmdir dir/below 2>&1 | grep -q 'not empty'",
    );
    assert_eq!(fs::metadata(mount.join("dir/below/program")).unwrap().mode() & 0o7777, 0o4755, "root keeps it");
    let user = ["--reuid=1234", "--regid=1234", "--clear-groups", "cat"];
    let output = Command::new("setpriv").args(user).arg(&file).output().unwrap();
    assert!(!output.status.success() && text(&output).contains("Permission denied"), "{}", text(&output));
    let ours = walk_path(mount.path()).unwrap();
    mount.umount();
    btrfs_check(image.path()).unwrap();
    let theirs = LoopMount::new(image.path(), "ro").unwrap();
    compare_entries(&ours, &walk_path(theirs.path()).unwrap(), Compare::ALL).unwrap();
    theirs.close().unwrap();
}

/// A confined server serves all requests. A confined server commits when `ubtrfs sync` asks for a commit, and when the
/// mount is unmounted, also by a signal. The kernel reports each thread of the server as confined.
#[test]
fn a_confined_server_serves_all_requests() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    for by_signal in [false, true] {
        // In the first round, root owns the image, so the server runs as nobody. In the second round, another user owns
        // the image, and the server runs as this user.
        let (uid, gid) = if by_signal { (4321, 4322) } else { (65534, 65534) };
        if by_signal {
            std::os::unix::fs::chown(image.path(), Some(uid), Some(gid)).unwrap();
        }
        let mount = Mount::new(image.path(), &["--sandbox", "-o", "compress=zstd"]);
        let server = server_of(mount.path());
        let mut threads = 0;
        for task in fs::read_dir(format!("/proc/{server}/task")).unwrap() {
            // Threads that measure how slow waking is end soon after the mount.
            let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
            assert!(status.contains("Seccomp:\t2\n") && status.contains("NoNewPrivs:\t1\n"), "{status}");
            let has = |name: &str, value: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), value, "{name} {status}");
            };
            has("Uid:", &format!("{uid} {uid} {uid} {uid}"));
            has("Gid:", &format!("{gid} {gid} {gid} {gid}"));
            has("Groups:", "");
            for set in ["CapPrm:", "CapEff:", "CapAmb:"] {
                has(set, "0000000000000000");
            }
            threads += 1;
        }
        assert!(threads > 2, "{threads} threads");
        // If the kernel has io_uring for FUSE, the confined server uses it, because the server makes its rings before
        // the confinement starts.
        let rings = u8::from(ubtrfs_device::has_fuse_rings());
        let stats = ubtrfs(["stats".as_ref(), "--prometheus".as_ref(), mount.path().as_os_str()]);
        assert!(text(&stats).contains(&format!("\nubtrfs_fuse_io_uring {rings}\n")), "{}", text(&stats));
        groups_decide(&mount);
        let mut rng = Rng::new(by_signal.into());
        for index in 0..40 {
            let file = fs::File::create(mount.join(&format!("file-{by_signal}-{index}"))).unwrap();
            file.write_all_at(&rng.content(50_000), 0).unwrap();
            if index % 8 == 0 {
                file.sync_all().unwrap();
            }
        }
        fs::write(mount.join("large"), rng.text(20 << 20)).unwrap();
        ok(&ubtrfs(["sync".as_ref(), mount.path().as_os_str()]));
        fs::remove_file(mount.join(&format!("file-{by_signal}-3"))).unwrap();
        let ours = walk_path(mount.path()).unwrap();
        if by_signal {
            let gone = || !Path::new(&format!("/proc/{server}")).exists();
            ok(&Command::new("kill").args(["-TERM", &server.to_string()]).output().unwrap());
            assert!((0..600).any(|_| gone() || {
                std::thread::sleep(std::time::Duration::from_millis(100));
                false
            }));
        } else {
            mount.umount();
        }
        btrfs_check(image.path()).unwrap();
        let theirs = LoopMount::new(image.path(), "ro").unwrap();
        compare_entries(&ours, &walk_path(theirs.path()).unwrap(), Compare::ALL).unwrap();
        theirs.close().unwrap();
    }
}

/// If a file's group cannot execute the file, a change of its content keeps the set-group-id bit if the caller is a
/// member of the group. All groups of the caller count, and a confined server cannot look them up by itself.
fn groups_decide(mount: &Mount) {
    if !capability::program("setpriv") {
        return;
    }
    let file = mount.join("of-a-group");
    for (group, expected) in [("500", 0o2745), ("501", 0o745)] {
        fs::write(&file, b"text").unwrap();
        std::os::unix::fs::chown(&file, Some(77), Some(500)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o2745)).unwrap();
        let script = "printf more >> \"$0\"";
        let args = ["--reuid=77", "--regid=78", &format!("--groups={group}"), "sh", "-c", script];
        ok(&Command::new("setpriv").args(args).arg(&file).output().unwrap());
        let meta = fs::metadata(&file).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.len(), meta.mode() & 0o7777), (77, 500, 8, expected), "group {group}");
    }
    fs::remove_file(&file).unwrap();
}
