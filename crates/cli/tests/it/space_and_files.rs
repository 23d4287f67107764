//! Tests of `ubtrfs filesystem df`, `usage`, `show`, `label`, `du`, `fiemap`, `clone` and `dedupe`: results on a mount
//! and on its image are equal, and the shown numbers equal those of btrfs-progs and filefrag on Linux's mount of the
//! image.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability};

use crate::common::{ok, refused, ubtrfs};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// A mount by the program; unmounted on drop.
struct Mount(TempDir);

impl Mount {
    fn new(image: &Path, options: &[&str]) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-filesystem-").unwrap();
        let (device, point) = (image.display().to_string(), dir.path().display().to_string());
        ok(ubtrfs(["mount"].iter().chain(options).chain([&&*device, &&*point])));
        Self(dir)
    }

    fn at(&self, path: &str) -> String {
        self.0.path().join(path).display().to_string()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = ubtrfs([OsStr::new("umount"), self.0.path().as_os_str()]);
    }
}

/// Removes the parts of the output that always differ: device paths; the global reserve, whose size Linux chooses at
/// each mount; and in mixed filesystems the estimate of free space, which depends on the reserve.
fn comparable(text: &str, device: &str) -> Vec<String> {
    let is_mixed = text.contains("Data+Metadata");
    let differs = |line: &str| {
        let is_reserve = line.contains("Global reserve") || line.contains("GlobalReserve");
        is_reserve || is_mixed && line.contains("Free (estimated)")
    };
    let is_equal = |line: &&str| !differs(line);
    text.trim_end().lines().filter(is_equal).map(|line| line.replace(device, "DEVICE")).collect()
}

const SHOWN: [&[&str]; 5] = [&["df"], &["df", "-b"], &["usage"], &["usage", "-b"], &["show"]];

#[test]
fn space_is_shown_as_by_btrfs_progs_on_linux() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    for options in [&["-L", "a label"][..], &["--mixed"], &["-m", "single"]] {
        let image = Image::kernel_made(1 << 30, options).unwrap();
        let linux = LoopMount::new(image.path(), "").unwrap();
        fs::write(linux.path().join("file"), Rng::new(3).bytes(60 << 20)).unwrap();
        fs::write(linux.path().join("small"), b"inline").unwrap();
        linux.close().unwrap();
        let linux = LoopMount::new(image.path(), "ro").unwrap();
        let theirs = SHOWN.map(|words| {
            let path = linux.path().display().to_string();
            let words = ["filesystem"].iter().chain(words).copied().chain([path.as_str()]);
            ok(Command::new("btrfs").args(words).env("LC_ALL", "C").output().unwrap())
        });
        let device = fs::read_to_string("/proc/self/mounts").unwrap();
        let point = linux.path().display().to_string();
        let line = device.lines().find(|line| line.split(' ').nth(1) == Some(&point)).unwrap();
        let device = line.split(' ').next().unwrap().to_owned();
        linux.close().unwrap();
        let path = image.path().display().to_string();
        let ours =
            |target: &str| SHOWN.map(|words| ok(ubtrfs(["filesystem"].iter().chain(words).copied().chain([target]))));
        let of_image = ours(&path);
        let mount = Mount::new(image.path(), &["-o", "ro"]);
        let of_mount = ours(&mount.at(""));
        drop(mount);
        for (index, words) in SHOWN.iter().enumerate() {
            let theirs = comparable(&theirs[index], &device);
            assert_eq!(comparable(&of_image[index], &path), theirs, "{options:?} {words:?}");
            assert_eq!(comparable(&of_mount[index], &path), theirs, "{options:?} {words:?}");
        }
    }
}

#[test]
fn users_see_the_space_but_not_what_each_device_holds() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("setpriv") {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &["-o", "allow_other"]);
    let bin = TempDir::new().unwrap();
    for dir in [mount.0.path(), bin.path()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let program = bin.path().join("ubtrfs");
    fs::copy(UBTRFS, &program).unwrap();
    let user = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]);
        command.arg(&program).arg("filesystem").args(words).arg(mount.0.path()).output().unwrap()
    };
    let usage = ok(user(&["usage"]));
    assert!(usage.contains("Metadata,DUP") && !usage.contains("Unallocated:\n"), "{usage}");
    ok(user(&["df"]));
    let refusal = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
        .arg(&program)
        .args(["filesystem", "label"])
        .arg(mount.0.path())
        .arg("mine")
        .output()
        .unwrap();
    refused(&refusal, &["cannot set the label", "only root and the user who mounted"]);
}

#[test]
fn labels_are_set_on_mounts_and_images_and_linux_reads_them() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let path = image.path().display().to_string();
    let label = |target: &str| ok(ubtrfs(["filesystem", "label", target]));
    let linux = || ok(Command::new("btrfs").args(["filesystem", "label", &path]).output().unwrap());
    ok(ubtrfs(["filesystem", "label", &path, "on an image"]));
    assert_eq!([label(&path), linux()], ["on an image\n", "on an image\n"]);
    btrfs_check(image.path()).unwrap();
    for options in [&[][..], &["--sandbox"]] {
        let mount = Mount::new(image.path(), options);
        ok(ubtrfs(["filesystem", "label", &mount.at(""), "on a mount"]));
        assert_eq!([label(&mount.at("")), linux()], ["on a mount\n", "on a mount\n"], "it is durable at once");
        let longest = "x".repeat(255);
        ok(ubtrfs(["filesystem", "label", &mount.at(""), &longest]));
        refused(&ubtrfs(["filesystem", "label", &mount.at(""), &"x".repeat(256)]), &["256 bytes", "at most 255"]);
        assert_eq!(label(&mount.at("")), format!("{longest}\n"));
        ok(ubtrfs(["filesystem", "label", &mount.at(""), ""]));
        assert_eq!(label(&mount.at("")), "\n");
    }
    btrfs_check(image.path()).unwrap();
    refused(&ubtrfs(["filesystem", "label", "/tmp"]), &["/tmp", "mount of ubtrfs", "IMAGE:/path"]);
    refused(&ubtrfs(["filesystem", "label", "/etc/passwd"]), &["/etc/passwd"]);
    refused(&ubtrfs(["filesystem", "df", "/nonexistent"]), &["/nonexistent"]);
}

/// Offset, length and address of each extent as `filefrag` shows them on Linux, in bytes.
fn extents_on_linux(file: &Path) -> Vec<[u64; 3]> {
    let text = ok(Command::new("filefrag").args(["-e", "-s", "-b1"]).arg(file).output().unwrap());
    let line = |line: &str| {
        let numbers: Vec<u64> = line
            .split(|c: char| !c.is_ascii_digit())
            .filter(|word| !word.is_empty())
            .map_while(|word| word.parse().ok())
            .collect();
        let is_extent = line.trim_start().starts_with(|c: char| c.is_ascii_digit()) && line.contains("..");
        is_extent.then(|| [numbers[1], numbers[5], numbers[3]])
    };
    text.lines().filter_map(line).collect()
}

fn our_extents(target: &str) -> Vec<[u64; 3]> {
    let text = ok(ubtrfs(["filesystem", "fiemap", "--json", target]));
    let extents: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let number = |extent: &serde_json::Value, name: &str| extent[name].as_u64().unwrap();
    extents.iter().map(|extent| ["offset", "len", "address"].map(|name| number(extent, name))).collect()
}

#[test]
fn extents_are_those_that_linux_shows() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("filefrag") {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = Mount::new(image.path(), &[]);
    let data = Rng::new(5).bytes(1 << 20);
    for block in 0..50u64 {
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().create(true).truncate(false).write(true).open(mount.at("sparse")).unwrap();
        file.write_all_at(&data[..8192], block * 65536).unwrap();
        file.sync_all().unwrap();
    }
    fs::write(mount.at("whole"), &data).unwrap();
    ok(ubtrfs(["sync", &mount.at("")]));
    let of_mount = [our_extents(&mount.at("sparse")), our_extents(&mount.at("whole"))];
    assert_eq!(of_mount[0].len(), 50);
    drop(mount);
    let path = image.path().display().to_string();
    let of_image = ["sparse", "whole"].map(|name| our_extents(&format!("{path}:/{name}")));
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let theirs = ["sparse", "whole"].map(|name| extents_on_linux(&linux.path().join(name)));
    linux.close().unwrap();
    assert_eq!(of_image, theirs);
    assert_eq!(of_mount, theirs);
}

#[test]
fn ranges_are_shared_on_mounts_and_images() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let data = Rng::new(6).bytes(3 << 20);
    let scratch = TempDir::new().unwrap();
    fs::write(scratch.path().join("data"), &data).unwrap();
    let mut changed = data.clone();
    changed[2 << 20] ^= 1;
    let path = image.path().display().to_string();
    let on_image = |name: &str| format!("{path}:/{name}");
    let work = |at: &dyn Fn(&str) -> String, prefix: &str| {
        let in_snapshot = at(&format!("snapshot/{prefix}-same"));
        let at = |name: &str| at(&format!("{prefix}-{name}"));
        let words = |command: &str, words: &[&str]| {
            ubtrfs(["filesystem", command].iter().chain(words).copied().collect::<Vec<_>>())
        };
        let (source, same, other, target) = (at("source"), at("same"), at("other"), at("target"));
        assert_ne!(our_extents(&same), our_extents(&source));
        ok(words("dedupe", &[&source, &same]));
        assert_eq!(our_extents(&same), our_extents(&source));
        refused(&words("dedupe", &[&source, &other]), &["differ", "nothing was changed"]);
        assert_ne!(our_extents(&other), our_extents(&source));
        ok(words("dedupe", &[&source, &other, "--length", "1M"]));
        ok(words("clone", &[&source, &target, "--source-offset", "1M", "--target-offset", "64K", "--length", "1M"]));
        assert_eq!(our_extents(&target).last().unwrap()[0], 65536);
        refused(&words("clone", &[&source, &target, "--source-offset", "1"]), &["sector size"]);
        refused(&words("clone", &[&source, &target, "--source-offset", "9M"]), &[]);
        // As by cp --reflink, a target that does not exist is made. It does not stay if the clone fails.
        ok(words("clone", &[&source, &at("new")]));
        assert_eq!(our_extents(&at("new")), our_extents(&source));
        refused(&words("clone", &[&source, &at("failed"), "--source-offset", "1"]), &["sector size"]);
        refused(&words("dedupe", &[&source, &at("failed")]), &["cannot open"]);
        refused(&words("clone", &[&source, &at("missing/new")]), &["cannot make"]);
        refused(&words("clone", &[&source, "/tmp"]), &[]);
        // As on Linux, root may deduplicate into a read-only snapshot.
        assert_ne!(our_extents(&in_snapshot), our_extents(&source));
        ok(words("dedupe", &[&source, &in_snapshot]));
        assert_eq!(our_extents(&in_snapshot), our_extents(&source));
        refused(&words("clone", &[&source, &in_snapshot]), &["ead-only"]);
    };
    let mount = Mount::new(image.path(), &[]);
    for prefix in ["mount", "image"] {
        for (name, content) in [("source", &data), ("same", &data), ("other", &changed)] {
            let path = mount.at(&format!("{prefix}-{name}"));
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        fs::write(mount.at(&format!("{prefix}-target")), b"0123").unwrap();
    }
    ok(ubtrfs(["sync", &mount.at("")]));
    ok(ubtrfs(["subvolume", "snapshot", "-r", &mount.at(""), &mount.at("snapshot")]));
    let times = |name: &str| fs::metadata(mount.at(name)).unwrap().modified().unwrap();
    let before = times("mount-same");
    // Read the file, so that the kernel caches a page that it later has to forget.
    assert_eq!(fs::read(mount.at("mount-target")).unwrap(), b"0123");
    work(&|name| mount.at(name), "mount");
    assert_eq!(times("mount-same"), before, "the content is the same");
    let expected = [b"0123".as_slice(), &vec![0; 65532], &data[1 << 20..2 << 20]].concat();
    assert!(fs::read(mount.at("mount-target")).unwrap() == expected);
    drop(mount);
    work(&on_image, "image");
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    for prefix in ["mount", "image"] {
        let read = |name: &str| fs::read(linux.path().join(format!("{prefix}-{name}"))).unwrap();
        let mode = |name: &str| fs::metadata(linux.path().join(format!("{prefix}-{name}"))).unwrap().mode();
        assert!(read("new") == data && mode("new") == mode("source"));
        assert!(
            read("source") == data && read("same") == data && read("other") == changed && read("target") == expected
        );
    }
    linux.scrub().unwrap();
    linux.close().unwrap();
}

/// Makes files with inline data, holes, compression and hard links, and extents that are shared within a file, with
/// other files, with snapshots, and with files and subvolumes that are deleted afterwards.
const SHARING: &str = r#"
    btrfs -q subvolume create a && cd a
    head -c 3000000 /dev/urandom > big; head -c 1000000 /dev/urandom > split; echo inline > small; mkdir -p d/e empty
    head -c 600000 /dev/urandom > d/e/deep; : > none; truncate -s 1M hole; mkfifo pipe; ln -s big link; sync
    for at in 5 50 100; do head -c 4096 /dev/urandom | dd of=split bs=4096 seek=$at conv=notrunc status=none; done; sync
    cp --reflink=always big clone; ln clone d/same; ln clone d/other
    fallocate -l 1M prealloc
    btrfs property set d compression zstd; yes | head -c 2000000 > d/packed; cp --reflink=always d/packed d/e/packed
    sync; cd ..; btrfs -q subvolume snapshot a b; btrfs -q subvolume snapshot a c; sync
    head -c 8192 /dev/urandom | dd of=b/big conv=notrunc status=none
    head -c 40000 /dev/urandom > b/own; rm b/d/same; btrfs -q subvolume delete c > /dev/null
    btrfs -q subvolume create alone; head -c 500000 /dev/urandom > alone/x; sync
    btrfs -q subvolume snapshot alone gone; sync; btrfs -q subvolume delete gone > /dev/null; btrfs subvolume sync . > /dev/null
    sync"#;

#[test]
fn du_counts_shared_data_as_btrfs_progs_does() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let mut command = Command::new("bash");
    ok(command.args(["-ec", SHARING]).current_dir(linux.path()).output().unwrap());
    let asked: [&[&str]; 3] = [&["a", "b", "alone"], &["-s", "a", "b", "", "alone/x"], &["a/big", "b/big", "a/d"]];
    let words = |asked: &[&str], place: &str| -> Vec<String> {
        let word = |word: &&str| if word.starts_with('-') { (*word).to_owned() } else { format!("{place}{word}") };
        ["filesystem", "du", "--raw"].map(str::to_owned).into_iter().chain(asked.iter().map(word)).collect()
    };
    let lines = |text: &str, place: &str| -> Vec<String> {
        // Both outputs are in the order of the directory, and their paths differ only in `place`.
        text.lines().map(|line| line.replace(place, "").trim_end_matches('/').to_owned()).collect()
    };
    let place = format!("{}/", linux.path().display());
    let theirs = asked.map(|asked| {
        let output = Command::new("btrfs").args(words(asked, &place)).env("LC_ALL", "C").output().unwrap();
        lines(&ok(output), &place)
    });
    linux.close().unwrap();
    let of_image = format!("{}:/", image.path().display());
    let mount = Mount::new(image.path(), &["-o", "ro"]);
    let of_mount = mount.at("");
    let of_mount = asked.map(|asked| lines(&ok(ubtrfs(words(asked, &of_mount))), &of_mount));
    drop(mount);
    let of_image = asked.map(|asked| lines(&ok(ubtrfs(words(asked, &of_image))), &of_image));
    for index in 0..asked.len() {
        assert_eq!(of_image[index], theirs[index], "{:?}", asked[index]);
        assert_eq!(of_mount[index], theirs[index], "{:?}", asked[index]);
    }
    let json = ok(ubtrfs(["filesystem", "du", "--json", "-s", &format!("{}:/a", image.path().display())]));
    assert!(json.contains("set_shared") && !json.contains("entries"), "{json}");
}

/// Puts a file into an image and damages its data. Returns the name of the file.
fn damaged_file(image: &str) -> &'static str {
    const NAME: &str = "damaged";
    let dir = TempDir::with_prefix("ubtrfs-filesystem-").unwrap();
    let source = dir.path().join("source");
    std::fs::write(&source, vec![0x5a; 1 << 20]).unwrap();
    ok(ubtrfs(["cp", source.to_str().unwrap(), &format!("{image}:/{NAME}")]));
    let mut bytes = std::fs::read(image).unwrap();
    let place = bytes.windows(8192).step_by(4096).position(|window| window.iter().all(|byte| *byte == 0x5a)).unwrap();
    bytes[place * 4096 + 10] = 0;
    std::fs::write(image, bytes).unwrap();
    NAME
}

#[test]
fn device_stats_show_the_errors_that_check_warns_of() {
    let dir = TempDir::with_prefix("ubtrfs-filesystem-").unwrap();
    let image = dir.path().join("a.img").display().to_string();
    ok(ubtrfs(["mkfs", "-q", "-b", "200M", &image]));
    let shown = ok(ubtrfs(["device", "stats", &image]));
    assert_eq!(shown.lines().count(), 5, "{shown}");
    assert!(shown.contains("].corruption_errs  0\n"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&ok(ubtrfs(["device", "stats", "--json", &image]))).unwrap();
    assert_eq!((&json[0]["devid"], &json[0]["corruption_errs"]), (&1.into(), &0.into()));
    // Let a read of the mount find a wrong checksum, which the counters record.
    let at = damaged_file(&image);
    if capability::fuse() {
        let mounted = TempDir::with_prefix("ubtrfs-filesystem-").unwrap();
        let mount = mounted.path().to_str().unwrap();
        ok(ubtrfs(["mount", &image, mount]));
        let read = std::fs::read(mounted.path().join(at));
        let errors = |output: &str| output.contains(".corruption_errs  ") && !output.contains(".corruption_errs  0\n");
        let before = ubtrfs(["device", "stats", "-c", mount]);
        let reset = ubtrfs(["device", "stats", "-z", mount]);
        ok(ubtrfs(["umount", mount]));
        assert!(read.is_err());
        let text = String::from_utf8_lossy(&before.stdout).into_owned();
        assert!(before.status.code() == Some(64) && errors(&text), "{text}");
        assert!(errors(&ok(reset)), "the counters before");
        let after = ok(ubtrfs(["device", "stats", "--check", &image]));
        assert!(after.contains("].corruption_errs  0\n"), "{after}");
    }
    let least = |name: &str| ok(ubtrfs([name, "min-dev-size", &image]));
    assert_eq!(least("inspect-internal"), least("inspect"));
}
