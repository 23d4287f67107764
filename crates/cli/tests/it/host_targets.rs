//! Tests of host files as targets of `cp`, `export --output` and `mount --timeline`. An image in use is never written,
//! a regular file is replaced as a whole or not at all, devices and FIFOs are written in place, and links are followed
//! as by cp.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{ok, refused};
use tempfile::TempDir;
use ubtrfs_testkit::capability::{fuse, kernel_oracle, program, root};
use ubtrfs_testkit::{Image, LoopDevice, LoopMount, btrfs_check, run as sh};

fn ubtrfs(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(args).stdin(Stdio::null()).output().unwrap()
}

struct Bed {
    dir: TempDir,
}

impl Bed {
    /// Makes `disk.img` with the file `/f`, 300,000 bytes long, and the directory `/d` with a copy of the file.
    fn new() -> Self {
        let bed = Self { dir: TempDir::new().unwrap() };
        bed.make_image("disk.img");
        bed
    }

    fn make_image(&self, name: &str) {
        let source = self.join("source");
        fs::create_dir_all(source.join("d")).unwrap();
        fs::write(source.join("f"), content()).unwrap();
        fs::write(source.join("d/f"), content()).unwrap();
        ok(ubtrfs(&["mkfs", "-q", "-r", &text(&source), "-b", "200M", &text(&self.join(name))]));
    }

    fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.join("disk.img").display())
    }

    /// Checks that no temporary file is left.
    fn is_tidy(&self) {
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(!name.to_string_lossy().starts_with(".ubtrfs"), "{name:?} was left");
        }
    }
}

/// Unmounts even if the test fails.
impl Drop for Bed {
    fn drop(&mut self) {
        for dir in ["mnt", "second"] {
            let _ = Command::new("umount").args(["-l", "-q"]).arg(self.join(dir)).stderr(Stdio::null()).status();
        }
    }
}

fn content() -> Vec<u8> {
    (0..300_000u32).map(|at| (at % 251) as u8).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn a_directory_that_exists_takes_the_attributes_of_the_copied_one() {
    let bed = Bed::new();
    // The image's root directory gets an attribute, a mode and times that the copies must have.
    let source = bed.join("source");
    rustix::fs::setxattr(&source, "user.top", b"value", rustix::fs::XattrFlags::empty()).unwrap();
    fs::set_permissions(&source, PermissionsExt::from_mode(0o750)).unwrap();
    ok(ubtrfs(&["cp", "-a", &format!("{}/.", text(&source)), &bed.at("/")]));
    let wanted = fs::metadata(&source).unwrap();
    for (name, from, args) in [("slash", "/", "-a"), ("dot", "/.", "-a"), ("below", "/d/.", "-a"), ("plain", "/", "-r")]
    {
        let target = bed.join(name);
        fs::create_dir(&target).unwrap();
        ok(ubtrfs(&["cp", args, &bed.at(from), &text(&target)]));
        assert_eq!(fs::read(target.join("f")).unwrap(), content(), "{name}");
        if name == "slash" || name == "dot" {
            let made = fs::metadata(&target).unwrap();
            assert_eq!((made.mode(), made.mtime()), (wanted.mode(), wanted.mtime()), "{name}");
            assert_eq!(made.mtime_nsec(), wanted.mtime_nsec(), "{name}");
            let mut value = [0; 16];
            let len = rustix::fs::getxattr(&target, "user.top", &mut value[..]).unwrap();
            assert_eq!(&value[..len], b"value", "{name}");
        }
    }
}

/// A set-user-id program of root would otherwise run as the user who copied it out of an image.
#[test]
fn a_copy_without_its_owner_loses_the_set_ids() {
    if !root() || !program("setpriv") {
        return;
    }
    let bed = Bed::new();
    let source = bed.join("tree");
    fs::create_dir_all(source.join("d")).unwrap();
    fs::write(source.join("run"), "program").unwrap();
    for name in ["run", "d"] {
        fs::set_permissions(source.join(name), PermissionsExt::from_mode(0o6755)).unwrap();
    }
    ok(ubtrfs(&["mkfs", "-q", "-r", &text(&source), "-b", "200M", &text(&bed.join("set.img"))]));
    ok(ubtrfs(&["cp", "-a", &format!("{}:/", text(&bed.join("set.img"))), &text(&bed.join("of-root"))]));
    fs::copy(env!("CARGO_BIN_EXE_ubtrfs"), bed.join("ubtrfs")).unwrap();
    fs::create_dir(bed.join("work")).unwrap();
    for (path, mode) in [(bed.dir.path().to_owned(), 0o755), (bed.join("set.img"), 0o644)] {
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    std::os::unix::fs::chown(bed.join("work"), Some(65534), Some(65534)).unwrap();
    let copied = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
        .args([bed.join("ubtrfs"), "cp".into(), "-a".into(), "../set.img:/.".into(), ".".into()])
        .current_dir(bed.join("work"))
        .output()
        .unwrap();
    ok(copied);
    for name in ["run", "d"] {
        let mode = |dir: &str| fs::metadata(bed.join(dir).join(name)).unwrap().mode() & 0o7777;
        assert_eq!((mode("of-root"), mode("work")), (0o6755, 0o755), "{name}");
    }
}

/// If one file is unreadable, it is reported, all others are copied or exported, and the status is 1.
#[test]
fn a_bad_file_does_not_stop_the_other_files() {
    let bed = Bed::new();
    let source = bed.join("tree");
    fs::create_dir_all(source.join("d/sub")).unwrap();
    let bad: Vec<u8> = (0..3_000_000u32).flat_map(|at| (at ^ 0x5eed_0bad).to_le_bytes()).take(3_000_000).collect();
    for (name, content) in [("d/a", &b"good a"[..]), ("d/bad", &bad), ("d/sub/y", b"good y"), ("z", b"good z")] {
        fs::write(source.join(name), content).unwrap();
    }
    fs::hard_link(source.join("d/bad"), source.join("d/same")).unwrap();
    let image = bed.join("bad.img");
    ok(ubtrfs(&["mkfs", "-q", "-r", &text(&source), "-b", "200M", &text(&image)]));
    // Damage the file in its second mebibyte.
    let mut raw = fs::read(&image).unwrap();
    let wanted = &bad[1_500_000..1_500_064];
    let places: Vec<usize> = places_of(&raw, wanted);
    assert_eq!(places.len(), 1, "its data is there once");
    raw[places[0]] ^= 1;
    fs::write(&image, raw).unwrap();
    let at = |path: &str| format!("{}:{path}", image.display());

    let failed = |output: &Output, names: &[&str]| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.lines().count(), names.len(), "{stderr}");
        for (line, name) in stderr.lines().zip(names) {
            assert!(line.starts_with("ubtrfs: ") && line.contains(name), "{line}");
        }
    };
    let good = |dir: &Path| {
        for name in ["d/a", "d/sub/y", "z"] {
            assert_eq!(fs::read(dir.join(name)).unwrap(), fs::read(source.join(name)).unwrap(), "{name}");
        }
    };
    for option in ["-r", "-a"] {
        let out = bed.join(&format!("out{option}"));
        failed(&ubtrfs(&["cp", option, &at("/"), &text(&out)]), &["d/bad'", "d/same'"]);
        good(&out);
        assert!(!out.join("d/bad").exists() && !out.join("d/same").exists(), "nothing broken is left");
        if option == "-a" {
            let times = |dir: &Path| fs::metadata(dir.join("d")).unwrap().mtime_nsec();
            assert_eq!(times(&out), times(&source), "directories are finished");
        }
        // Copy from the image `bad.img` into the image `disk.img`.
        ok(ubtrfs(&["mkdir", &bed.at(&format!("/in{option}"))]));
        let target = bed.at(&format!("/in{option}"));
        failed(&ubtrfs(&["cp", option, &at("/."), &target]), &["d/bad'", "d/same'"]);
        assert_eq!(ok(ubtrfs(&["cat", &bed.at(&format!("/in{option}/z"))])), "good z");
    }
    for option in ["--sparse", "--no-xattrs"] {
        let (archive, out) = (bed.join("a.tar"), bed.join(&format!("tar{option}")));
        failed(&ubtrfs(&["export", option, "-f", &text(&archive), &at("/")]), &["d/bad"]);
        fs::create_dir(&out).unwrap();
        sh("tar", ["-C".as_ref(), out.as_os_str(), "-xf".as_ref(), archive.as_os_str()]).unwrap();
        good(&out);
        let exported = fs::read(out.join("d/bad")).unwrap();
        assert_eq!(exported.len(), bad.len());
        // Only the block that cannot be read becomes zeros.
        let mut expected = bad.clone();
        expected[1_499_136..1_503_232].fill(0);
        assert!(exported == expected);
        assert_eq!(fs::metadata(out.join("d/same")).unwrap().ino(), fs::metadata(out.join("d/bad")).unwrap().ino());
    }
    // Copy from the host. The image itself cannot be a source.
    fs::remove_dir_all(bed.join("source")).unwrap();
    let host = bed.join("host");
    fs::create_dir(&host).unwrap();
    fs::hard_link(bed.join("disk.img"), host.join("m")).unwrap();
    fs::write(host.join("z"), "after it").unwrap();
    failed(&ubtrfs(&["cp", "-r", &text(&host), &bed.at("/")]), &["host/m"]);
    assert_eq!(ok(ubtrfs(&["cat", &bed.at("/host/z")])), "after it");
    ok(ubtrfs(&["check", &text(&bed.join("disk.img"))]));
    btrfs_check(&bed.join("disk.img")).unwrap();
    // An image cannot contain itself.
    let inside = bed.join("host/new.img");
    let made = ubtrfs(&["mkfs", "-q", "-r", &text(&host), "-b", "200M", &text(&inside)]);
    refused(&made, &["the directory to copy"]);
}

fn places_of(bytes: &[u8], wanted: &[u8]) -> Vec<usize> {
    let first = wanted[0];
    (0..bytes.len() - wanted.len())
        .filter(|at| bytes[*at] == first && &bytes[*at..*at + wanted.len()] == wanted)
        .collect()
}

#[test]
fn an_image_in_use_is_no_target_by_any_path() {
    let bed = Bed::new();
    let image = bed.join("disk.img");
    let before = fs::read(&image).unwrap();
    symlink("disk.img", bed.join("symlink")).unwrap();
    fs::hard_link(&image, bed.join("hard")).unwrap();
    fs::create_dir(bed.join("dir")).unwrap();
    symlink("../disk.img", bed.join("dir/f")).unwrap();
    for target in ["disk.img", "symlink", "hard"] {
        let target = text(&bed.join(target));
        for args in [&["cp", &bed.at("/f")][..], &["cp", "-a", &bed.at("/f")]] {
            refused(&ubtrfs(&[args, &[&target]].concat()), &["in use"]);
        }
        refused(&ubtrfs(&["export", "--output", &target, &bed.at("/")]), &["in use"]);
    }
    refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join("dir"))]), &["in use"]);
    fs::rename(bed.join("hard"), bed.join("dir/f")).unwrap();
    refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join("dir"))]), &["in use"]);
    refused(&ubtrfs(&["cp", "-r", &bed.at("/d/."), &text(&bed.join("dir"))]), &["in use"]);
    // The image cannot be a source of a copy into itself either.
    refused(&ubtrfs(&["cp", &text(&image), &bed.at("/copy")]), &["is the image"]);
    for target in ["new.img", "disk.img", "dir/new.img", "symlink"] {
        let target = text(&bed.join(target));
        refused(
            &ubtrfs(&["mkfs", "-q", "-f", "-r", &text(bed.dir.path()), "-b", "1G", &target]),
            &["the directory to copy"],
        );
    }
    assert!(fs::read(&image).unwrap() == before);
    assert!(!bed.join("new.img").exists());
    bed.is_tidy();
}

#[test]
fn an_image_that_is_mounted_is_no_target() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    bed.make_image("other.img");
    let (image, other, dir) = (bed.join("disk.img"), text(&bed.join("other.img")), bed.join("mnt"));
    fs::create_dir(&dir).unwrap();
    symlink("other.img", bed.join("symlink")).unwrap();
    let tries = |how: &str| {
        for target in [&other, &text(&bed.join("symlink"))] {
            refused(&ubtrfs(&["cp", &bed.at("/f"), target]), &[how]);
            refused(&ubtrfs(&["export", "--output", target, &bed.at("/")]), &[how]);
        }
    };
    ok(ubtrfs(&["mount", &other, &text(&dir)]));
    tries("in use");
    refused(&ubtrfs(&["mount", "--timeline", &other, &text(&image), &text(&bed.join("source"))]), &[]);
    ok(ubtrfs(&["umount", &text(&dir)]));
    btrfs_check(Path::new(&other)).unwrap();

    let mount = LoopMount::new(Path::new(&other), "").unwrap();
    tries("mounted by the kernel");
    mount.close().unwrap();
    btrfs_check(Path::new(&other)).unwrap();

    let before = fs::read(&image).unwrap();
    for target in [&text(&image), &other] {
        let locked = (target == &other).then(|| LoopMount::new(Path::new(&other), "ro").unwrap());
        let output = ubtrfs(&["mount", "--timeline", target, &text(&image), &text(&dir)]);
        refused(&output, &[if locked.is_some() { "mounted by the kernel" } else { "in use" }]);
    }
    // Each refused mount had opened the filesystem before it refused the timeline. The content is intact nevertheless.
    btrfs_check(&image).unwrap();
    assert_eq!(fs::read(&image).unwrap().len(), before.len());
    ok(ubtrfs(&["check", &text(&image)]));
    bed.is_tidy();
}

#[test]
fn devices_and_fifos_are_written_into() {
    if !kernel_oracle() {
        return;
    }
    let bed = Bed::new();
    // Make device nodes for the test, so that a bug that removes its target does not hit the machine's nodes.
    let (null, full) = (bed.join("null"), bed.join("full"));
    sh("mknod", [full.as_os_str(), "c".as_ref(), "1".as_ref(), "7".as_ref()]).unwrap();
    sh("mknod", [null.as_os_str(), "c".as_ref(), "1".as_ref(), "3".as_ref()]).unwrap();
    symlink("null", bed.join("to-null")).unwrap();
    for target in ["null", "to-null"] {
        ok(ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join(target))]));
        ok(ubtrfs(&["cp", "-a", &bed.at("/f"), &text(&bed.join(target))]));
        ok(ubtrfs(&["export", "--output", &text(&bed.join(target)), &bed.at("/")]));
    }
    assert!(fs::symlink_metadata(&null).unwrap().file_type().is_char_device());
    refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&full)]), &["No space left"]);
    refused(&ubtrfs(&["export", "--output", &text(&full), &bed.at("/")]), &["No space left"]);

    let fifo = bed.join("fifo");
    sh("mkfifo", [&fifo]).unwrap();
    let reader = {
        let fifo = fifo.clone();
        std::thread::spawn(move || fs::read(fifo).unwrap())
    };
    ok(ubtrfs(&["cp", &bed.at("/f"), &text(&fifo)]));
    assert!(reader.join().unwrap() == content());
    assert!(fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());
    // Write to standard output under a name that cannot be removed.
    assert!(ubtrfs(&["cp", &bed.at("/f"), "/proc/self/fd/1"]).stdout == content());
}

#[test]
fn links_are_followed_as_cp_does() {
    let bed = Bed::new();
    fs::write(bed.join("real"), "old").unwrap();
    fs::set_permissions(bed.join("real"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("real", bed.join("link")).unwrap();
    ok(ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join("link"))]));
    assert!(fs::symlink_metadata(bed.join("link")).unwrap().is_symlink());
    assert!(fs::read(bed.join("real")).unwrap() == content());
    assert_eq!(fs::metadata(bed.join("real")).unwrap().mode() & 0o7777, 0o640, "the mode stays");
    symlink("nowhere", bed.join("dangling")).unwrap();
    refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join("dangling"))]), &["leads nowhere"]);
    refused(&ubtrfs(&["cp", &bed.at("/f"), &format!("{}/", text(&bed.join("missing")))]), &["does not exist"]);
    refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&bed.join("missing/file"))]), &["missing", "does not exist"]);
    refused(&ubtrfs(&["export", "--output", &text(&bed.join("missing/file")), &bed.at("/")]), &["missing"]);
    ok(ubtrfs(&["cp", "-r", &bed.at("/d"), &format!("{}/", text(&bed.join("made")))]));
    assert!(fs::read(bed.join("made/f")).unwrap() == content());
    bed.is_tidy();
}

#[test]
fn an_error_leaves_the_old_target_whole() {
    if !kernel_oracle() {
        return;
    }
    let bed = Bed::new();
    // A small ext4 on the host has space for the old files, but not for the new ones.
    let small = Image::empty(16 << 20).unwrap();
    sh("mkfs.ext4", ["-q".as_ref(), small.path().as_os_str()]).unwrap();
    let mnt = bed.join("small");
    fs::create_dir(&mnt).unwrap();
    sh("mount", ["-o".as_ref(), "loop".as_ref(), small.path().as_os_str(), mnt.as_os_str()]).unwrap();
    let full = std::panic::catch_unwind(|| {
        fs::write(mnt.join("f"), "old").unwrap();
        fs::write(mnt.join("a.tar"), "old").unwrap();
        let fill = format!("of={}", text(&mnt.join("fill")));
        Command::new("dd").args(["if=/dev/zero", "bs=64k", &fill]).stderr(Stdio::null()).status().unwrap();
        let listed = || fs::read_dir(&mnt).unwrap().count();
        let before = listed();
        refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&mnt)]), &["No space left"]);
        refused(&ubtrfs(&["cp", &bed.at("/f"), &text(&mnt.join("new"))]), &["No space left"]);
        refused(&ubtrfs(&["export", "--output", &text(&mnt.join("a.tar")), &bed.at("/")]), &["No space left"]);
        assert_eq!(fs::read(mnt.join("f")).unwrap(), b"old");
        assert_eq!(fs::read(mnt.join("a.tar")).unwrap(), b"old");
        assert_eq!(listed(), before, "nothing is left");
    });
    sh("umount", [&mnt]).unwrap();
    full.unwrap();

    // Copy into an image from a source that cannot be read to its end.
    ok(ubtrfs(&["mkfs", "-q", "-b", "128M", &text(&bed.join("tiny.img"))]));
    let tiny = |path: &str| format!("{}:{path}", text(&bed.join("tiny.img")));
    fs::write(bed.join("old"), "old").unwrap();
    ok(ubtrfs(&["cp", &text(&bed.join("old")), &tiny("/f")]));
    let large = fs::File::create(bed.join("large")).unwrap();
    large.set_len(300 << 20).unwrap();
    let mut random = fs::File::open("/dev/urandom").unwrap().take(300 << 20);
    std::io::copy(&mut random, &mut &large).unwrap();
    refused(&ubtrfs(&["cp", &text(&bed.join("large")), &tiny("/f")]), &["space"]);
    assert_eq!(ok(ubtrfs(&["cat", &tiny("/f")])), "old");
    assert_eq!(ok(ubtrfs(&["ls", &tiny("/")])), "f\n", "nothing is left");
    btrfs_check(&bed.join("tiny.img")).unwrap();
}

#[test]
fn a_pipe_is_read_to_its_end() {
    let bed = Bed::new();
    let mut child = Command::new("sh")
        .args(["-c", "head -c 3000000 /dev/zero | tr '\\0' x | \"$0\" cp /dev/stdin \"$1\""])
        .args([env!("CARGO_BIN_EXE_ubtrfs"), &bed.at("/piped")])
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    let piped = ubtrfs(&["cat", &bed.at("/piped")]).stdout;
    assert!(piped.len() == 3_000_000 && piped.iter().all(|byte| *byte == b'x'), "{}", piped.len());
    ok(ubtrfs(&["check", &text(&bed.join("disk.img"))]));
    ok(ubtrfs(&["cp", "/proc/cpuinfo", &bed.at("/cpuinfo")]));
    assert!(!ok(ubtrfs(&["cat", &bed.at("/cpuinfo")])).is_empty(), "a file without a size has content");
}

/// A device mapper device over another device, removed when it is dropped.
struct Mapped(String);

impl Mapped {
    fn over(device: &str) -> Option<Self> {
        let sectors = sh("blockdev", ["--getsz", device]).unwrap();
        let name = format!("ubtrfs-test-{}", std::process::id());
        let table = format!("0 {} linear {device} 0", sectors.trim());
        let made = sh("dmsetup", ["create", &name, "--table", &table]);
        made.map(|_| Self(name)).map_err(|error| eprintln!("no device mapper here: {error:#}")).ok()
    }

    fn path(&self) -> String {
        format!("/dev/mapper/{}", self.0)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = sh("dmsetup", ["remove", "--retry", &self.0]);
    }
}

/// While an image or a device made from it is in use, the image and all devices made from it are refused.
#[test]
fn a_device_over_an_image_in_use_is_in_use() {
    if !kernel_oracle() || !fuse() {
        return;
    }
    let bed = Bed::new();
    bed.make_image("other.img");
    let (image, dir) = (text(&bed.join("disk.img")), bed.join("mnt"));
    let source = text(&bed.join("other.img"));
    let (from, source_dir, point) = (format!("{source}:/f"), text(&bed.join("source")), text(&dir));
    fs::create_dir(&dir).unwrap();
    let plain = LoopDevice::over(image.as_ref()).unwrap();
    let stacked = LoopDevice::over(plain.path().as_ref()).unwrap();
    // Try every way to open an image, with the device in place of `DEVICE`.
    let ways: [&[&str]; 11] = [
        &["mkdir", "DEVICE:/new"],
        &["rm", "DEVICE:/f"],
        &["ls", "DEVICE:/"],
        &["mkfs", "-q", "-f", "DEVICE"],
        &["mkfs", "-q", "-f", "-r", &source_dir, "DEVICE"],
        &["subvolume", "create", "DEVICE:/s"],
        &["cp", &from, "DEVICE:/g"],
        &["cp", &from, "DEVICE"],
        &["export", "-f", "DEVICE", &from],
        &["rescue", "super-recover", "-y", "DEVICE"],
        &["tune", "-m", "DEVICE"],
    ];
    let refuse_all = |device: &str, word: &str| {
        for way in ways {
            let line: Vec<String> = way.iter().map(|part| part.replace("DEVICE", device)).collect();
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            refused(&ubtrfs(&line), &[word]);
        }
    };
    ok(ubtrfs(&["mount", &image, &point]));
    let before = fs::read(dir.join("f")).unwrap();
    // Linux can attach a loop device to the image even after the image was mounted.
    let late = LoopDevice::over(image.as_ref()).unwrap();
    for device in [plain.path(), stacked.path(), late.path()] {
        refuse_all(device, "in use");
        assert_eq!(ubtrfs(&["check", device]).status.code(), Some(2));
    }
    assert!(fs::read(dir.join("f")).unwrap() == before);
    drop(late);
    ok(ubtrfs(&["umount", &point]));
    btrfs_check(Path::new(&image)).unwrap();

    // Now the other way round: mount the device, and try the commands on the image.
    ok(ubtrfs(&["mount", plain.path(), &point]));
    refuse_all(&image, "disk.img");
    refuse_all(stacked.path(), "in use");
    refuse_all(plain.path(), "is mounted by ubtrfs");
    ok(ubtrfs(&["umount", &point]));
    btrfs_check(Path::new(&image)).unwrap();

    // The image is no longer in use, so commands accept one of its devices at a time.
    drop(stacked);
    if let Some(mapped) = Mapped::over(plain.path()) {
        ok(ubtrfs(&["mount", &mapped.path(), &point]));
        refuse_all(&image, "disk.img");
        ok(ubtrfs(&["umount", &point]));
        ok(ubtrfs(&["mkdir", &format!("{}:/mapped", mapped.path())]));
    }
    ok(ubtrfs(&["mkdir", &format!("{}:/looped", plain.path())]));
    assert!(ok(ubtrfs(&["ls", &image])).contains("looped"));
    drop(plain);
    ok(ubtrfs(&["check", &image]));
    btrfs_check(Path::new(&image)).unwrap();
}
