//! Tests of `ubtrfs filesystem resize` and `defragment`, on images and in mounts, with equal
//! results.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run};

use crate::common::{ok, on_terminal, refused, ubtrfs};

const MIB: u64 = 1 << 20;

/// Returns the size of the device that the superblock states.
fn total_bytes(image: &Path) -> u64 {
    let dump = ok(ubtrfs(["inspect", "dump-super", image.to_str().unwrap()]));
    let line = dump.lines().find(|line| line.starts_with("total_bytes")).unwrap();
    line.split_whitespace().last().unwrap().parse().unwrap()
}

/// A new filesystem, mounted on a new directory. `None` if this machine cannot run the tests.
fn mounted(len_bytes: u64) -> Option<(Image, tempfile::TempDir)> {
    if !capability::kernel_oracle() || !capability::fuse() {
        return None;
    }
    let image = Image::kernel_made(len_bytes, &[]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    ok(ubtrfs([OsStr::new("mount"), image.path().as_os_str(), dir.path().as_os_str()]));
    Some((image, dir))
}

#[test]
fn an_image_grows_and_shrinks() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 * MIB, &[]).unwrap();
    let path = image.path().to_str().unwrap();
    assert_eq!(ok(ubtrfs(["filesystem", "resize", "1G", path])), "device 1: 536870912 -> 1073741824 bytes\n");
    assert_eq!((total_bytes(image.path()), fs::metadata(path).unwrap().len()), (1 << 30, 1 << 30));
    let shrunk = ok(ubtrfs(["filesystem", "resize", "--json", "1:-600M", path]));
    assert!(shrunk.contains("\"now_bytes\":444596224"), "{shrunk}");
    assert_eq!(total_bytes(image.path()), 424 * MIB);
    ok(ubtrfs(["filesystem", "resize", "max", path]));
    assert_eq!(total_bytes(image.path()), 1 << 30);
    let grown = ok(ubtrfs(["filesystem", "resize", "+10M", path]));
    assert_eq!((total_bytes(image.path()), fs::metadata(path).unwrap().len()), (1034 * MIB, 1034 * MIB), "{grown}");
    ok(ubtrfs(["filesystem", "resize", "1:+10M", path]));
    assert_eq!((total_bytes(image.path()), fs::metadata(path).unwrap().len()), (1044 * MIB, 1044 * MIB));
    ok(ubtrfs(["filesystem", "resize", "1G", path]));
    refused(&ubtrfs(["filesystem", "resize", "2:+1M", path]), &["no device 2"]);
    refused(&ubtrfs(["filesystem", "resize", "10M", path]), &["too small", "32M", "min-dev-size"]);
    refused(&ubtrfs(["filesystem", "resize", "2:1G", path]), &["no device 2"]);
    refused(&ubtrfs(["filesystem", "resize", "-8G", path]), &["1073741824 bytes"]);
    refused(&ubtrfs(["filesystem", "resize", "big", path]), &["'big' is not a size", "10G"]);
    assert_eq!(total_bytes(image.path()), 1 << 30);
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    mount.scrub().unwrap();
    mount.close().unwrap();
}

#[test]
fn a_filesystem_shrinks_to_its_least_size_and_its_image_with_it() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(2048 * MIB, &[]).unwrap();
    let path = image.path().to_str().unwrap();
    let file_len = || fs::metadata(path).unwrap().len();
    let least: u64 = ok(ubtrfs(["inspect", "min-dev-size", path])).split(' ').next().unwrap().parse().unwrap();
    refused(&ubtrfs(["filesystem", "resize", "2:min", path]), &["no device 2"]);
    let shrunk = ok(ubtrfs(["filesystem", "resize", "min", path]));
    assert!(shrunk.starts_with("device 1: 2147483648 -> "), "{shrunk}");
    let now = total_bytes(image.path());
    assert!(now <= least && file_len() == 2048 * MIB, "{now} {least}");
    btrfs_check(image.path()).unwrap();
    // Nothing is left to shrink, but the file is still long.
    let same = format!("device 1: {now} -> {now} bytes\n");
    assert_eq!(ok(ubtrfs(["filesystem", "resize", "--truncate", "min", path])), same);
    assert_eq!((total_bytes(image.path()), file_len()), (now, now));
    btrfs_check(image.path()).unwrap();
    // A balance leaves holes, but does not prevent this size.
    ok(ubtrfs(["filesystem", "resize", "2G", path]));
    ok(ubtrfs(["balance", "start", "--full-balance", path]));
    ok(ubtrfs(["filesystem", "resize", "min", path]));
    assert!(total_bytes(image.path()) <= least, "{} {least}", total_bytes(image.path()));
    ok(ubtrfs(["filesystem", "resize", "1G", path]));
    ok(ubtrfs(["filesystem", "resize", "--truncate", "700M", path]));
    assert_eq!((total_bytes(image.path()), file_len()), (700 * MIB, 700 * MIB));
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    mount.scrub().unwrap();
    mount.close().unwrap();
}

#[test]
fn a_mount_is_resized_and_its_files_defragmented() {
    let Some((image, dir)) = mounted(512 * MIB) else { return };
    let (path, mount) = (image.path().to_str().unwrap(), dir.path().to_str().unwrap());
    refused(&ubtrfs(["filesystem", "resize", "1G", mount]), &["has 536870912 bytes", "truncate"]);
    fs::File::options().write(true).open(path).unwrap().set_len(1 << 30).unwrap();
    refused(&ubtrfs(["filesystem", "resize", "--truncate", "max", mount]), &["is in a mount", "without --truncate"]);
    assert_eq!(ok(ubtrfs(["filesystem", "resize", "max", mount])), "device 1: 536870912 -> 1073741824 bytes\n");

    // Write every second block first, so that the file is fragmented.
    let (name, content) = (format!("{mount}/file"), vec![b'x'; 4 << 20]);
    let mut file = fs::File::create(&name).unwrap();
    for half in [0, 1] {
        for block in (half..content.len() / 4096).step_by(2) {
            file.seek(SeekFrom::Start(block as u64 * 4096)).unwrap();
            file.write_all(&content[..4096]).unwrap();
        }
        file.sync_all().unwrap();
    }
    drop(file);
    refused(&ubtrfs(["filesystem", "defragment", mount]), &["is a directory", "-r"]);
    let done = ok(ubtrfs(["filesystem", "defrag", "--json", "-r", mount]));
    assert_eq!(done, "{\"failed\":0,\"files\":1,\"rewritten_bytes\":4194304}\n");
    let again = ok(ubtrfs(["filesystem", "defragment", "-f", "--json", &name]));
    assert_eq!(again, "{\"failed\":0,\"files\":1,\"rewritten_bytes\":0}\n");
    assert!(fs::read(&name).unwrap() == content);
    ok(ubtrfs(["umount", mount]));
    let on_image = format!("{path}:/file");
    let packed = ok(ubtrfs(["filesystem", "defragment", "--json", "-c", "zstd", &on_image]));
    assert_eq!(packed, "{\"failed\":0,\"files\":1,\"rewritten_bytes\":4194304}\n");
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    assert!(fs::read(linux.path().join("file")).unwrap() == content);
    linux.scrub().unwrap();
    linux.close().unwrap();
}

#[test]
fn a_file_in_a_mount_is_not_taken_for_its_mount() {
    let Some((image, dir)) = mounted(512 * MIB) else { return };
    let mount = dir.path().to_str().unwrap();
    let (file, inner) = (format!("{mount}/file"), format!("{mount}/inner.img"));
    fs::write(&file, "content").unwrap();
    refused(
        &ubtrfs(["filesystem", "resize", "400M", &file]),
        &[&file, "is a file in a mount", &format!("give {mount}")],
    );
    refused(&ubtrfs(["filesystem", "resize", "cancel", &file]), &["is a file in a mount"]);
    refused(&ubtrfs(["filesystem", "resize", "x:400M", mount]), &["ubtrfs filesystem show"]);
    assert_eq!(ok(ubtrfs(["filesystem", "resize", "max", mount])), "device 1: 536870912 -> 536870912 bytes\n");
    // An image in a mount is an image.
    ok(ubtrfs(["mkfs", "-q", "-b", "128M", &inner]));
    assert_eq!(ok(ubtrfs(["filesystem", "resize", "+16M", &inner])), "device 1: 134217728 -> 150994944 bytes\n");
    ok(ubtrfs(["umount", mount]));
    btrfs_check(image.path()).unwrap();
}

#[test]
fn defragment_goes_on_after_an_operand_that_fails_and_names_its_files() {
    let Some((image, dir)) = mounted(512 * MIB) else { return };
    let (path, mount) = (image.path().to_str().unwrap(), dir.path().to_str().unwrap());
    fs::create_dir_all(dir.path().join("d/e")).unwrap();
    for name in ["a", "d/b", "d/e/c"] {
        fs::write(dir.path().join(name), b"content").unwrap();
    }
    std::os::unix::fs::symlink("b", dir.path().join("d/link")).unwrap();
    let at = |name: &str| format!("{mount}/{name}");
    let several = ubtrfs(["filesystem", "defragment", "-v", &at("missing"), &at("a"), &at("d"), &at("d/b")]);
    assert_eq!(several.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&several.stdout), format!("{mount}/a\n{mount}/d/b\n"));
    assert_eq!(String::from_utf8_lossy(&several.stderr).lines().count(), 2, "{several:?}");
    // As btrfs-progs prints it, in another order.
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let listed = sorted(&ok(ubtrfs(["filesystem", "defragment", "-v", "-r", &at("d")])));
    ok(ubtrfs(["umount", mount]));
    let linux = LoopMount::new(image.path(), "").unwrap();
    let theirs = run("btrfs", ["-v", "filesystem", "defragment", "-r", linux.path().join("d").to_str().unwrap()]);
    let theirs = sorted(&theirs.unwrap().replace(linux.path().to_str().unwrap(), mount));
    linux.close().unwrap();
    assert_eq!(listed, theirs);
    assert_eq!(
        ok(ubtrfs(["filesystem", "defragment", "-v", "-r", &format!("{path}:/d/e")])),
        format!("{path}:/d/e/c\n")
    );
    let du = ubtrfs(["filesystem", "du", "-s", &format!("{path}:/missing"), &format!("{path}:/a")]);
    let said = String::from_utf8_lossy(&du.stderr).into_owned();
    assert!(du.status.code() == Some(1) && said.contains("missing") && said.lines().count() == 1, "{said}");
    assert!(String::from_utf8_lossy(&du.stdout).contains(&format!("{path}:/a\n")), "{du:?}");
}

#[test]
fn a_running_resize_is_cancelled() {
    let Some((image, dir)) = mounted(4 << 30) else { return };
    let mount = dir.path().to_str().unwrap();
    for number in 0..6 {
        fs::write(dir.path().join(format!("file-{number}")), vec![number; 100 << 20]).unwrap();
    }
    ok(ubtrfs(["sync", mount]));
    refused(&ubtrfs(["filesystem", "resize", "cancel", mount]), &["no resize is running"]);
    // A resize that empties block groups waits for a send, and this send waits because nobody reads its stream.
    ok(ubtrfs(["subvolume", "snapshot", "-r", mount, &format!("{mount}/snapshot")]));
    let mut send = crate::common::command(["send", &format!("{mount}/snapshot")]);
    let mut send = send.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut begin = vec![0; 1 << 20];
    send.stdout.as_mut().unwrap().read_exact(&mut begin).unwrap();
    let mut resize = crate::common::command(["filesystem", "resize", "1G", mount]);
    let resize = resize.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !ubtrfs(["filesystem", "resize", "cancel", mount]).status.success() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the resize begins");
    }
    refused(&resize.wait_with_output().unwrap(), &["cannot resize", "it was cancelled", "the size is unchanged"]);
    send.kill().unwrap();
    send.wait().unwrap();
    refused(&ubtrfs(["filesystem", "resize", "cancel", mount]), &["no resize is running"]);
    let begun = Instant::now();
    while !ubtrfs(["umount", mount]).status.success() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody uses the mount");
    }
    assert_eq!(total_bytes(image.path()), 4 << 30);
    btrfs_check(image.path()).unwrap();
}

/// A loop device that no other program uses. It is removed when the value is dropped, because the limit on discards of a
/// loop device stays when another file is attached.
struct OwnLoop {
    number: u32,
}

impl OwnLoop {
    fn attach(image: &Path) -> Self {
        let own = Self { number: 1000 + std::process::id() % 1_000_000 };
        own.control("0x4C80");
        run("losetup", [&own.device(), image.to_str().unwrap()]).unwrap();
        own
    }

    fn device(&self) -> String {
        format!("/dev/loop{}", self.number)
    }

    /// Makes an ioctl of /dev/loop-control.
    fn control(&self, number: &str) {
        let script = "import fcntl, os, sys
fcntl.ioctl(os.open('/dev/loop-control', os.O_RDWR), int(sys.argv[1], 16), int(sys.argv[2]))";
        run("python3", ["-c", script, number, &self.number.to_string()]).unwrap();
    }
}

impl Drop for OwnLoop {
    fn drop(&mut self) {
        let _ = run("umount", [&*self.device()]);
        let _ = run("losetup", ["-d", &*self.device()]);
        let begun = Instant::now();
        while std::panic::catch_unwind(|| self.control("0x4C81")).is_err() && begun.elapsed() < Duration::from_secs(10)
        {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_device_without_discards_is_not_trimmed() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("python3") {
        return;
    }
    let image = Image::kernel_made(512 * MIB, &[]).unwrap();
    let own = OwnLoop::attach(image.path());
    let device = own.device();
    fs::write(format!("/sys/block/loop{}/queue/discard_max_bytes", own.number), "0").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().to_str().unwrap();
    let trim = || std::process::Command::new("fstrim").arg(mount).env("LC_ALL", "C").output().unwrap();
    ok(ubtrfs(["mount", &device, mount]));
    let (ours, trimmed) = (trim(), ubtrfs(["filesystem", "trim", mount]));
    ok(ubtrfs(["umount", mount]));
    run("mount", ["-t", "btrfs", &device, mount]).unwrap();
    let theirs = trim();
    run("umount", [mount]).unwrap();
    assert_eq!((ours.status.code(), ours.stderr), (theirs.status.code(), theirs.stderr));
    refused(&trimmed, &["cannot discard the free space", "without discards"]);
}

#[test]
fn usage_draws_bars_on_a_terminal_only() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", image.to_str().unwrap()]));
    assert!(!ok(ubtrfs(["filesystem", "usage", image.to_str().unwrap()])).contains('['));
    let steps = [("Used:0.00B (0.00%)  [------------------------]", ""), ("Metadata,DUP", ""), ("%)  [#----", "")];
    ok(on_terminal(dir.path(), &["filesystem", "usage", "a.img"], &steps));
}
