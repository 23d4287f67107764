//! Tests of commands on a mount: a read-only mount or bind mount refuses changes, the caller's capabilities decide,
//! commands see data and sizes that so far only the kernel has, and printed paths can be opened.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::{Corruption, Corruptor, Image, LoopMount, Rng, btrfs_check, capability, run, second_opinion};

use crate::common::{NOBODY, ok, refused, ubtrfs};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// Words of a command line.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// An image, and a separate directory with its mount.
struct Bed {
    image: Image,
    dir: TempDir,
}

impl Bed {
    fn new(options: &str) -> Self {
        let bed =
            Self { image: Image::kernel_made(1 << 30, &[]).unwrap(), dir: TempDir::with_prefix("ubtrfs-c-").unwrap() };
        fs::create_dir(bed.at("m")).unwrap();
        bed.mount(options);
        bed
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn mount(&self, options: &str) {
        let (image, point) = (self.image.path().display(), self.at("m"));
        ok(ubtrfs(words(&format!("mount -o {options} {image} {}", point.display()))));
    }

    fn unmount(&self) {
        ok(ubtrfs([OsStr::new("umount"), self.at("m").as_os_str()]));
    }

    /// Runs a command in the test's directory, where `m` is the mount and `b` a second path to the mount.
    fn run(&self, line: &str) -> Output {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "120"]).args(words(line)).current_dir(self.dir.path()).env("LC_ALL", "C");
        command.stdin(Stdio::null()).output().unwrap()
    }

    fn ubtrfs(&self, line: &str) -> Output {
        self.run(&format!("{UBTRFS} {line}"))
    }

    fn check(self) {
        self.unmount();
        second_opinion(self.image.path()).unwrap();
        btrfs_check(self.image.path()).unwrap();
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for name in ["b", "m"] {
            let _ = Command::new("umount").arg("-l").arg(self.at(name)).stderr(Stdio::null()).status();
        }
    }
}

const CHANGES: &str = "subvolume create b/new
subvolume snapshot b/sv b/snap
subvolume snapshot m/sv b/snap
subvolume delete b/sv
subvolume set-default 256 b
filesystem label b x
filesystem resize -16M b
filesystem defragment -r b
property set b/sv ro true
property set b/f compression zstd
quota enable b
balance start -m b";

#[test]
fn nothing_changes_through_a_read_only_mount() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("python3") {
        return;
    }
    let bed = Bed::new("commit=30");
    ok(bed.ubtrfs("subvolume create m/sv"));
    fs::write(bed.at("m/f"), b"data").unwrap();
    ok(bed.ubtrfs("sync m"));
    fs::create_dir(bed.at("b")).unwrap();
    ok(bed.run("mount --bind m b"));
    ok(bed.run("mount -o remount,bind,ro b"));
    for line in CHANGES.lines() {
        refused(&bed.ubtrfs(line), &["read-only"]);
    }
    // The ioctls SUBVOL_CREATE, SNAP_DESTROY, SET_FSLABEL and RESIZE are refused too.
    for (number, argument) in
        [(0x5000_940e_u32, "new"), (0x5000_940f, "sv"), (0x4100_9432, "x"), (0x5000_9403, "1:-16m")]
    {
        let is_label = number == 0x4100_9432;
        let (fd, len) = if is_label { (0, 256) } else { (8, 4096) };
        let program = format!(
            "import fcntl, os\n\
             fd = os.open('b', os.O_RDONLY)\n\
             data = bytes({fd}) + b'{argument}'\n\
             try: fcntl.ioctl(fd, {number}, bytearray(data + bytes({len} - len(data))))\n\
             except OSError as error: print(error.errno)"
        );
        let output = Command::new("python3").args(["-c", &program]).current_dir(bed.dir.path()).output().unwrap();
        assert_eq!(ok(output), "30\n", "{argument}");
    }
    for line in ["subvolume list b", "sync b", "filesystem df b", "subvolume snapshot b/sv m/s"] {
        let output = bed.ubtrfs(line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    ok(bed.run("umount b"));
    // Make the mount itself read-only, not only a bind mount of it.
    ok(bed.run("mount -i -o remount,ro m"));
    fs::remove_dir(bed.at("b")).unwrap();
    std::os::unix::fs::symlink("m", bed.at("b")).unwrap();
    for line in CHANGES.lines() {
        refused(&bed.ubtrfs(line), &["read-only"]);
    }
    bed.check();
}

#[test]
fn capabilities_decide_and_not_the_user_id() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return;
    }
    let bed = Bed::new("allow_other");
    let script = |base: &str, progs: &str| {
        let none = "setpriv --bounding-set -all --inh-caps -all";
        let nobody = NOBODY.join(" ");
        let no_admin = "setpriv --bounding-set -sys_admin --inh-caps -sys_admin";
        let mut results = Vec::new();
        for line in [
            format!("mkdir {base}/home"),
            format!("chown nobody {base}/home"),
            format!("{nobody} {progs} subvolume create {base}/home/u"),
            format!("{none} touch {base}/home/x"),
            format!("{none} {progs} subvolume create {base}/home/new"),
            format!("{none} {progs} property set {base}/home/u ro true"),
            format!("{none} {progs} subvolume snapshot {base}/home/u {base}/home/s"),
            format!("{progs} subvolume snapshot {base}/home/u {base}/home/s2"),
            format!("{none} {progs} subvolume delete {base}/home/u"),
            format!("{no_admin} {progs} subvolume delete {base}/home/s2"),
            format!("{no_admin} {progs} subvolume create {base}/home/t"),
            format!("{progs} subvolume delete {base}/home/u"),
        ] {
            let done = bed.run(&line).status.success();
            results.push((line.replace(base, "B").replace(progs, "btrfs"), done));
        }
        results
    };
    let ours = script(&bed.at("m").display().to_string(), UBTRFS);
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let theirs = script(&linux.path().display().to_string(), "btrfs");
    linux.close().unwrap();
    assert_eq!(ours, theirs);
    bed.check();
}

#[test]
fn a_clone_makes_files_longer_where_the_kernel_keeps_sizes() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    for options in ["writeback_cache", "commit=30"] {
        let bed = Bed::new(options);
        let (source, old) = (Rng::new(1).bytes(100_000), Rng::new(2).bytes(5000));
        fs::write(bed.at("m/source"), &source).unwrap();
        fs::write(bed.at("m/target"), &old).unwrap();
        ok(bed.ubtrfs("filesystem clone m/source m/target"));
        assert_eq!(fs::metadata(bed.at("m/target")).unwrap().len(), 100_000, "{options}");
        assert!(fs::read(bed.at("m/target")).unwrap() == source, "{options}");
        let mut file = fs::OpenOptions::new().append(true).open(bed.at("m/target")).unwrap();
        std::io::Write::write_all(&mut file, b"append").unwrap();
        drop(file);
        // A clone that fails does not change the size.
        refused(&bed.ubtrfs("filesystem clone --target-offset 5 m/source m/target"), &["multiples of the sector size"]);
        assert_eq!(fs::metadata(bed.at("m/target")).unwrap().len(), 100_006, "{options}");
        // Source and target are one file: the range ends at the old end.
        let own: Vec<u8> = Rng::new(3).bytes(65_536);
        fs::write(bed.at("m/own"), &own).unwrap();
        ok(bed.ubtrfs("filesystem clone --target-offset 1M m/own m/own"));
        let grown = fs::read(bed.at("m/own")).unwrap();
        assert!(grown.len() == (1 << 20) + 65_536 && grown[1 << 20..] == own && grown[..65_536] == own, "{options}");
        bed.unmount();
        bed.mount(options);
        let expected = [&source[..], b"append"].concat();
        assert!(fs::read(bed.at("m/target")).unwrap() == expected, "{options}");
        bed.check();
    }
}

/// The kernel appends at the file size that it has cached, so a clone must update this size.
#[test]
fn an_append_after_a_clone_goes_to_the_new_end() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    for options in ["commit=30", "noallow_other", "writeback_cache"] {
        let bed = Bed::new(options);
        let source = Rng::new(1).bytes(100_000);
        fs::write(bed.at("m/source"), &source).unwrap();
        fs::write(bed.at("m/log"), "first\n").unwrap();
        let mut log = fs::OpenOptions::new().append(true).open(bed.at("m/log")).unwrap();
        std::io::Write::write_all(&mut log, b"second\n").unwrap();
        ok(bed.ubtrfs("filesystem clone m/source m/log"));
        std::io::Write::write_all(&mut log, b"third\n").unwrap();
        drop(log);
        let expected = [&source[..], b"third\n"].concat();
        assert!(fs::read(bed.at("m/log")).unwrap() == expected, "{options}");
        bed.unmount();
        bed.mount(options);
        assert!(fs::read(bed.at("m/log")).unwrap() == expected, "{options}, after a remount");
        bed.check();
    }
}

#[test]
fn a_clone_removes_the_capabilities_of_its_target_as_a_write_does() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new("commit=30");
    for name in ["m/source", "m/target"] {
        fs::write(bed.at(name), vec![7; 8192]).unwrap();
    }
    set_capability(&bed.at("m/target"));
    ok(bed.ubtrfs("filesystem clone --length 4096 m/source m/target"));
    assert!(!has_capability(&bed.at("m/target")));
    bed.check();
}

/// Gives a file a capability.
fn set_capability(path: &Path) {
    rustix::fs::setxattr(path, CAPABILITY, &ubtrfs_testkit::CAPABILITY, rustix::fs::XattrFlags::empty()).unwrap();
}

fn has_capability(path: &Path) -> bool {
    match rustix::fs::getxattr(path, CAPABILITY, &mut [0; 64]) {
        Ok(_) => true,
        Err(rustix::io::Errno::NODATA) => false,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

const CAPABILITY: &str = "security.capability";

#[test]
fn an_append_removes_the_capabilities_of_an_append_only_file() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("chattr") {
        return;
    }
    for options in ["commit=30", "commit=30,writeback_cache", "commit=30,noallow_other,noxattr"] {
        let bed = Bed::new("commit=30");
        let path = bed.at("m/log");
        fs::write(&path, b"line").unwrap();
        set_capability(&path);
        bed.unmount();
        bed.mount(options);
        assert!(bed.run(&format!("chattr +a {}", path.display())).status.success());
        let append = |path: &Path| {
            use std::io::Write;
            fs::OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap();
        };
        append(&path);
        append(&path);
        bed.unmount();
        bed.mount("commit=30");
        assert_eq!(fs::read(&path).unwrap(), b"linemoremore");
        assert!(!has_capability(&path), "{options}");
        assert!(bed.run(&format!("chattr -a {}", path.display())).status.success());
        bed.check();
    }
}

/// An idmapped mount shows files under other owners than the filesystem stores. The control socket learns only the user
/// id of a client, not the mount through which the client reached the file. So the server cannot tell whether the
/// client owns the file, and only root may run commands on such a mount.
#[test]
fn only_root_runs_commands_on_a_mount_whose_owners_may_be_mapped() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return;
    }
    let bed = Bed::new("allow_other");
    let home = bed.at("m/home");
    assert!(bed.run(&format!("mkdir {}", home.display())).status.success());
    assert!(bed.run(&format!("chown nobody {}", home.display())).status.success());
    let nobody = NOBODY.join(" ");
    let create = |name: &str| bed.run(&format!("{nobody} {UBTRFS} subvolume create {}/{name}", home.display()));
    assert!(create("a").status.success());
    bed.unmount();
    bed.mount("allow_other,idmap");
    refused(&create("b"), &["idmap"]);
    let freeze = format!("{nobody} {UBTRFS} property set {}/a ro true", home.display());
    refused(&bed.run(&freeze), &["idmap"]);
    ok(bed.ubtrfs("subvolume create m/home/c"));
    bed.check();
}

#[test]
fn a_deduplication_shows_the_blocks_that_are_left() {
    use std::os::unix::fs::MetadataExt;
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new("commit=30");
    fs::write(bed.at("m/zeros"), vec![0; 1 << 20]).unwrap();
    fs::File::create(bed.at("m/hole")).unwrap().set_len(1 << 20).unwrap();
    ok(bed.ubtrfs("sync m"));
    let blocks = || fs::metadata(bed.at("m/zeros")).unwrap().blocks();
    assert_eq!(blocks(), 2048);
    ok(bed.ubtrfs("filesystem dedupe m/hole m/zeros"));
    let shown = blocks();
    bed.unmount();
    bed.mount("commit=30");
    assert_eq!(shown, blocks());
    bed.check();
}

#[test]
fn printed_paths_of_a_mount_can_be_opened() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new("commit=30");
    ok(bed.ubtrfs("subvolume create m/v"));
    ok(bed.ubtrfs("subvolume create m/w"));
    fs::create_dir(bed.at("m/v/d")).unwrap();
    fs::write(bed.at("m/v/f"), vec![7; 100_000]).unwrap();
    fs::hard_link(bed.at("m/v/f"), bed.at("m/v/d/link")).unwrap();
    run("cp", [bed.at("m/v/f").as_os_str(), bed.at("m/w/copy").as_os_str()]).unwrap();
    ok(bed.ubtrfs("filesystem clone m/v/f m/w/copy"));
    ok(bed.ubtrfs("sync m"));
    // Commands take a file in a mount as a path in the mount, not as an image.
    assert_eq!(ok(bed.ubtrfs("inspect rootid m/v/f")), "256\n");
    for line in ["filesystem df m/v/f", "subvolume list m/v/f", "balance status m/v/f", "filesystem label m/v/f"] {
        ok(bed.ubtrfs(line));
    }
    let shown = |text: &str| text.replace(&bed.at("").display().to_string(), "/");
    let of_inode = ok(bed.ubtrfs("inspect inode-resolve 258 m/v"));
    assert_eq!(shown(&of_inode), "/m/v/d/link\n/m/v/f\n");
    assert!(of_inode.lines().all(|path| Path::new(path).is_file()));
    let json: serde_json::Value = serde_json::from_str(&ok(bed.ubtrfs("filesystem fiemap --json m/v/f"))).unwrap();
    let bytenr = json.to_string().split("\"address\":").nth(1).unwrap().split([',', '}']).next().unwrap().to_owned();
    let of_data = ok(bed.ubtrfs(&format!("inspect logical-resolve {bytenr} m")));
    assert_eq!(shown(&of_data), "/m/v/d/link\n/m/v/f\n/m/w/copy\n");
    bed.unmount();
    bed.mount("subvol=v");
    assert_eq!(shown(&ok(bed.ubtrfs("inspect inode-resolve 258 m"))), "/m/d/link\n/m/f\n");
    let output = bed.ubtrfs(&format!("inspect logical-resolve {bytenr} m"));
    assert!(output.status.success());
    assert_eq!(shown(&String::from_utf8_lossy(&output.stdout)), "/m/d/link\n/m/f\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("w/copy: not in this mount"));
    bed.check();
}

#[test]
fn snapshots_have_the_limits_of_their_source() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new("commit=30");
    // The option -i is ignored while quotas are off.
    ok(bed.ubtrfs("subvolume create -i 1/7 m/off"));
    let shows = |base: &Path, progs: &str| {
        for line in ["quota enable B", "subvolume create B/s", "qgroup limit 30M B/s", "qgroup limit -e 20M B/s"]
            .into_iter()
            .chain(["subvolume snapshot B/s B/t", "qgroup create 65535/281474976710655 B"])
        {
            let line = format!("{progs} {}", line.replace('B', &base.display().to_string()));
            assert!(bed.run(&line).status.success(), "{line}");
        }
        run("sync", ["-f".as_ref(), base.as_os_str()]).unwrap();
        let shown = bed.run(&format!("{progs} qgroup show --raw -re {}", base.display()));
        let lines = String::from_utf8_lossy(&shown.stdout).into_owned();
        // Compare only the limits. The ids of groups differ, because the filesystem on our mount has one more subvolume
        // (`off`).
        let limits = |line: &str| line.split_whitespace().skip(3).take(2).map(str::to_owned).collect::<Vec<_>>();
        lines.lines().filter(|line| line.contains('/')).map(limits).collect::<Vec<_>>()
    };
    let ours = shows(&bed.at("m"), UBTRFS);
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let mut theirs = shows(linux.path(), "btrfs");
    linux.close().unwrap();
    // Linux's filesystem does not have the subvolume `off`, so insert our line about this subvolume.
    theirs.insert(1, ours[1].clone());
    assert_eq!(ours, theirs);
    refused(&bed.ubtrfs("subvolume snapshot -i 0/5 m/s m/u"), &["0/5", "higher level"]);
    bed.check();
}

#[test]
fn a_user_changes_a_file_of_the_lower_directory_of_an_overlay() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return;
    }
    if !fs::read_to_string("/proc/filesystems").unwrap().contains("\toverlay\n")
        && run("modprobe", ["overlay"]).is_err()
    {
        eprintln!("SKIPPED: Linux has no overlayfs");
        assert!(std::env::var_os("CI").is_none(), "CI must have overlayfs");
        return;
    }
    let bed = Bed::new("rw");
    for dir in ["lower", "upper", "work", "merged"] {
        fs::create_dir(bed.at("m").join(dir)).unwrap();
    }
    let file = bed.at("m").join("lower/f");
    fs::write(&file, b"lower").unwrap();
    std::os::unix::fs::chown(&file, Some(65534), Some(65534)).unwrap();
    ok(bed.run("mount -t overlay -o lowerdir=m/lower,upperdir=m/upper,workdir=m/work overlay m/merged"));
    let done = bed.run(&format!("{} chmod 600 m/merged/f", NOBODY.join(" ")));
    let trusted = bed.run(&format!("{} setfattr -n trusted.x -v 1 m/upper/f", NOBODY.join(" ")));
    ok(bed.run("umount m/merged"));
    ok(done);
    assert!(!trusted.status.success(), "Linux refuses it: {trusted:?}");
    assert_eq!(fs::metadata(bed.at("m").join("upper/f")).unwrap().len(), 5);
    bed.unmount();
    btrfs_check(bed.image.path()).unwrap();
}

#[test]
fn a_listing_has_the_names_of_damaged_inodes() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new("rw");
    let names: Vec<String> = (0..100).map(|number| format!("file-{number}")).collect();
    fs::create_dir(bed.at("m/d")).unwrap();
    names.iter().for_each(|name| fs::write(bed.at("m/d").join(name), b"content").unwrap());
    bed.unmount();
    let damage = Corruptor::new(&bed.image).unwrap().apply(Corruption::NoLinks, &mut Rng::new(1)).unwrap();
    assert!(damage.is_some());
    bed.mount("ro");
    let list = ok(bed.run("ls -U m/d"));
    assert_eq!(list.lines().collect::<BTreeSet<_>>(), names.iter().map(String::as_str).collect());
    assert_eq!(list.lines().count(), names.len());
    bed.unmount();
}

#[test]
fn du_counts_what_a_user_may_read() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return;
    }
    let bed = Bed::new("rw");
    for (path, owner, mode) in [("open", 0, "755"), ("open/own", 65534, "700"), ("open/closed", 0, "700")] {
        let dir = bed.at("m").join(path);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("f"), vec![7; 100_000]).unwrap();
        std::os::unix::fs::chown(&dir, Some(owner), None).unwrap();
        ok(bed.run(&format!("chmod {mode} {}", dir.display())));
    }
    fs::write(bed.at("m/open/secret"), vec![7; 100_000]).unwrap();
    ok(bed.run("chmod 600 m/open/secret"));
    ok(bed.run("sync"));
    let as_nobody = |path: &str| bed.run(&format!("{} {UBTRFS} filesystem du -s --raw {path}", NOBODY.join(" ")));
    assert!(ok(as_nobody("m/open/own")).contains(" 102400 "));
    let some = as_nobody("m/open");
    assert!(String::from_utf8_lossy(&some.stdout).contains(" 204800 "), "{some:?}");
    refused(&some, &["m/open", "may not read 2"]);
    assert!(ok(bed.ubtrfs("filesystem du -s --raw m/open")).contains(" 409600 "));
    bed.unmount();
}

#[test]
fn a_user_clones_a_file_that_nobody_may_write() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return;
    }
    let bed = Bed::new("rw");
    let home = bed.at("m/home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("from"), vec![7; 100_000]).unwrap();
    ok(bed.run("chmod 444 m/home/from"));
    ok(bed.run("chown -R nobody m/home"));
    ok(bed.run(&format!("{} {UBTRFS} filesystem clone m/home/from m/home/to", NOBODY.join(" "))));
    ok(bed.run("cmp m/home/from m/home/to"));
    assert_eq!(fs::metadata(home.join("to")).unwrap().permissions().mode() & 0o777, 0o444);
    refused(&bed.ubtrfs("filesystem clone m/home m/home/other"), &["m/home is a directory"]);
    bed.check();
}

/// btrfs-convert marks the image of the old filesystem as read-only. With a change in it, the way back would be lost.
#[test]
fn the_image_that_btrfs_convert_saves_is_not_written() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("btrfs-convert") {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-c-").unwrap();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(300 << 20).unwrap();
    let path = image.to_str().unwrap();
    run("mkfs.ext4", ["-q", "-F", "-b", "4096", path]).unwrap();
    run("btrfs-convert", [path]).unwrap();
    let point = dir.path().join("m");
    fs::create_dir(&point).unwrap();
    ok(ubtrfs([OsStr::new("mount"), image.as_os_str(), point.as_os_str()]));
    let saved = point.join("ext2_saved/image");
    let denied = std::io::ErrorKind::PermissionDenied;
    assert_eq!(fs::File::options().write(true).open(&saved).unwrap_err().kind(), denied);
    assert!(run("truncate", ["-s", "5", saved.to_str().unwrap()]).is_err());
    assert!(fs::read(&saved).unwrap()[1080..1082] == [0x53, 0xef], "the magic of ext4");
    ok(ubtrfs([OsStr::new("umount"), point.as_os_str()]));
    let inside = format!("{path}:/ext2_saved/image");
    refused(&ubtrfs([OsStr::new("truncate"), OsStr::new("-s"), OsStr::new("5"), OsStr::new(&inside)]), &["ext2_saved"]);
    btrfs_check(&image).unwrap();
    run("btrfs-convert", ["-r", path]).unwrap();
}
