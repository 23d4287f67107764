//! Tests of several mounts of one image: each shows a subvolume of its own, with flags of its own, and one server serves
//! them all. Every test ends with an image that `btrfs check` accepts.
//!
//! The image has the subvolumes `@` (256), `@home` (257) and `@/srv` (258), the directory `plain`, and the link `way` to
//! `@home`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::{LoopDevice, LoopMount, btrfs_check, capability, run};

use crate::common::{NOBODY, let_users_mount, ok, refused, server_of, text, ubtrfs};

/// An image with subvolumes, and directories `a` to `d` for its mounts.
struct Scene {
    scratch: TempDir,
    /// The mounted file: the image, or a loop device over it.
    device: PathBuf,
}

const DIRS: [&str; 4] = ["a", "b", "c", "d"];

impl Scene {
    /// `None` if FUSE or root is missing here.
    fn new() -> Option<Self> {
        if !capability::fuse() || !capability::root() {
            return None;
        }
        let scratch = TempDir::with_prefix("ubtrfs-joined-").unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let image = scratch.path().join("e.img");
        for name in DIRS {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", &text(&image)]));
        for name in ["@", "@home", "@/srv"] {
            ok(ubtrfs(["subvolume", "create", &format!("{}:/{name}", text(&image))]));
        }
        let scene = Self { device: image, scratch };
        scene.mount(&[], "a");
        fs::create_dir(scene.path("a/plain")).unwrap();
        symlink("@home", scene.path("a/way")).unwrap();
        scene.umount("a");
        Some(scene)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("e.img")
    }

    fn try_mount(&self, options: &[&str], dir: &str) -> Output {
        let (device, dir) = (text(&self.device), text(&self.path(dir)));
        ubtrfs([&["mount"], options, &[&*device, &*dir]].concat())
    }

    #[track_caller]
    fn mount(&self, options: &[&str], dir: &str) {
        ok(self.try_mount(options, dir));
    }

    #[track_caller]
    fn umount(&self, dir: &str) {
        ok(ubtrfs(["umount", &text(&self.path(dir))]));
    }

    #[track_caller]
    fn umount_each(&self, dirs: &[&str]) {
        for dir in dirs {
            self.umount(dir);
        }
    }

    fn write(&self, name: &str) {
        fs::write(self.path(name), name).unwrap();
    }

    #[track_caller]
    fn assert_reads(&self, name: &str, content: &str) {
        assert_eq!(fs::read_to_string(self.path(name)).unwrap(), content, "{name}");
    }

    /// The fields root and options of the mount on a directory, and the options of its filesystem.
    fn shown(&self, dir: &str) -> Option<(String, Vec<String>)> {
        let table = fs::read("/proc/self/mountinfo").unwrap();
        let dir = text(&self.path(dir));
        let table = String::from_utf8_lossy(&table);
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|line| line[4] == dir)?;
        Some((fields[3].to_owned(), fields[5].split(',').map(str::to_owned).collect()))
    }

    fn is_mounted(&self, dir: &str) -> bool {
        self.shown(dir).is_some()
    }

    /// The content of a file of the image, once no server has the image open.
    fn stored(&self, name: &str) -> String {
        let file = format!("{}:/{name}", text(&self.image()));
        let begun = Instant::now();
        loop {
            let shown = ubtrfs(["cat", &file]);
            let said = String::from_utf8_lossy(&shown.stderr).into_owned();
            if !said.contains("in use") {
                return String::from_utf8_lossy(&shown.stdout).into_owned() + &said;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the server ends: {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the server that was started for a directory, as a crash would.
    fn kill(&self, dir: &str) {
        let server = server_of(&self.path(dir));
        run("kill", ["-9", &server.to_string()]).unwrap();
        let begun = Instant::now();
        while fs::read(format!("/proc/{server}/cmdline")).is_ok_and(|line| !line.is_empty()) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    fn check(&self) {
        btrfs_check(&self.image()).unwrap();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // The inner mounts come first.
        for name in ["a/home", "d", "c", "b", "a"] {
            while rustix::mount::unmount(self.path(name), rustix::mount::UnmountFlags::DETACH).is_ok() {}
        }
    }
}

#[test]
fn every_subvolume_is_mounted_with_flags_of_its_own() {
    for sandbox in [&[][..], &["--sandbox"]] {
        let Some(scene) = Scene::new() else { return };
        let options = |list: &'static str| [sandbox, &["-o", list]].concat();
        scene.mount(&options("subvol=@"), "a");
        scene.mount(&["-o", "subvol=/@home,noexec"], "b");
        scene.mount(&["-o", "subvolid=5,ro"], "c");
        scene.mount(&["-o", "subvol=@/srv,nodev,nosuid"], "d");
        let has = |dir: &str, flag: &str| scene.shown(dir).unwrap().1.iter().any(|shown| shown == flag);
        assert_eq!(DIRS.map(|dir| scene.shown(dir).unwrap().0), ["/@", "/@home", "/", "/@/srv"]);
        assert_eq!(DIRS.map(|dir| has(dir, "ro")), [false, false, true, false]);
        assert_eq!(DIRS.map(|dir| has(dir, "noexec")), [false, true, false, false]);
        let is_distrusted = !sandbox.is_empty();
        for flag in ["nodev", "nosuid"] {
            assert_eq!(DIRS.map(|dir| has(dir, flag)), [is_distrusted, is_distrusted, is_distrusted, true], "{flag}");
        }
        let devices = DIRS.map(|dir| fs::metadata(scene.path(dir)).unwrap().dev());
        assert!(devices.iter().all(|device| *device == devices[0]), "one superblock");

        scene.write("a/f");
        scene.write("b/g");
        scene.write("d/h");
        scene.assert_reads("c/@/f", "a/f");
        scene.assert_reads("c/@home/g", "b/g");
        scene.assert_reads("a/srv/h", "d/h");
        let denied = fs::write(scene.path("c/plain/x"), "x").unwrap_err();
        assert_eq!(denied.raw_os_error(), Some(30), "EROFS: {denied}");
        fs::copy("/bin/true", scene.path("b/true")).unwrap();
        assert!(Command::new(scene.path("b/true")).status().is_err(), "noexec");
        assert!(Command::new(scene.path("a/../b/true")).status().is_err());
        fs::copy("/bin/true", scene.path("a/true")).unwrap();
        assert!(Command::new(scene.path("a/true")).status().unwrap().success());

        scene.umount_each(&DIRS);
        scene.check();
        let linux = LoopMount::new(&scene.image(), "ro").unwrap();
        assert_eq!(fs::read_to_string(linux.join("@/srv/h")).unwrap(), "d/h");
        linux.close().unwrap();
    }
}

#[test]
fn the_default_subvolume_is_mounted_if_none_is_named() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&[], "b");
    assert!(scene.path("b/plain").is_dir(), "the top level");
    ok(ubtrfs(["subvolume", "set-default", &text(&scene.path("b/@home"))]));
    scene.mount(&[], "c");
    assert_eq!(scene.shown("c").unwrap().0, "/@home");
    scene.mount(&["-o", "subvolid=258"], "d");
    assert_eq!(scene.shown("d").unwrap().0, "/@/srv");
    scene.umount_each(&DIRS);
    scene.mount(&[], "a");
    assert_eq!(scene.shown("a").unwrap().0, "/@home", "also by a server of its own");
    scene.umount("a");
    scene.check();
}

#[test]
fn only_subvolumes_are_mounted_and_links_are_not_followed() {
    let Some(scene) = Scene::new() else { return };
    for is_first in [true, false] {
        if !is_first {
            scene.mount(&["-o", "subvol=@"], "a");
        }
        for name in ["plain", "way", "none", "@/none"] {
            let output = scene.try_mount(&["-o", &format!("subvol={name}")], "b");
            refused(&output, &["cannot mount", "does not exist", name, "ubtrfs subvolume list"]);
        }
        refused(&scene.try_mount(&["-o", "subvolid=999"], "b"), &["cannot mount", "999"]);
        refused(&scene.try_mount(&["-o", "subvol=@,subvolid=257"], "b"), &["contradicts"]);
        assert!(!scene.is_mounted("b"));
    }
    scene.umount("a");
    scene.check();
}

#[test]
fn options_of_the_whole_filesystem_are_those_of_the_first_mount() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@,noatime,compress=zstd:3"], "a");
    let at = text(&scene.path("a"));
    for option in ["compress=lzo", "commit=7", "atime", "noacl", "threads=2", "dirsync", "noallow_other"] {
        let output = scene.try_mount(&["-o", &format!("subvol=@home,{option}")], "b");
        refused(&output, &[&format!("'{option}' differs"), &at]);
    }
    refused(&scene.try_mount(&["-o", "frobnicate"], "b"), &["frobnicate"]);
    for (option, words) in [
        ("-f", &["omit -f"][..]),
        ("--timeline=x", &["omit --timeline"]),
        ("--sandbox", &["--sandbox differs"]),
        ("--memory=64M", &["'memory=67108864' differs"]),
        ("--compress=lzo", &["'compress=lzo' differs"]),
    ] {
        refused(&scene.try_mount(&[option], "b"), words);
    }
    assert!(!scene.is_mounted("b"));
    scene.mount(&["-o", "subvol=@home,noatime,compress=zstd:3,commit=30,defaults"], "b");
    scene.mount(&["-o", "subvol=@home"], "c");
    assert!(scene.shown("c").unwrap().1.contains(&"noatime".to_owned()));
    scene.umount_each(&["a", "b", "c"]);

    scene.mount(&["-o", "subvol=@,ro"], "a");
    refused(&scene.try_mount(&["-o", "subvol=@home"], "b"), &["read-only", "-o ro", "unmount", &at]);
    scene.mount(&["-o", "subvol=@home,ro"], "b");
    scene.umount_each(&["b", "a"]);
    scene.check();
}

/// The kernel has one cache of the pages of all mounts.
#[test]
fn stores_to_a_mapping_are_read_at_once_through_another_mount() {
    if !capability::program("python3") {
        return;
    }
    const MAP: &str = "import mmap, os, sys\n\
                       fd = os.open('f', os.O_CREAT | os.O_RDWR)\n\
                       os.ftruncate(fd, 7)\n\
                       mapped = mmap.mmap(fd, 7)\n\
                       for line in sys.stdin:\n\
                       \x20   mapped[:] = line.strip().encode()\n\
                       \x20   print(flush=True)\n";
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvolid=5"], "b");
    let mut mapper = Command::new("python3");
    mapper.args(["-c", MAP]).current_dir(scene.path("a")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut mapper = mapper.spawn().unwrap();
    let mut said = BufReader::new(mapper.stdout.take().unwrap());
    for word in ["content", "another"] {
        writeln!(mapper.stdin.as_mut().unwrap(), "{word}").unwrap();
        said.read_line(&mut String::new()).unwrap();
        scene.assert_reads("b/@/f", word);
    }
    drop(mapper.stdin.take());
    mapper.wait().unwrap();
    scene.umount_each(&["a", "b"]);
    assert_eq!(scene.stored("@/f"), "another");
    scene.check();
}

#[test]
fn the_mounts_are_unmounted_in_every_order() {
    let Some(scene) = Scene::new() else { return };
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in orders {
        for (dir, subvol) in [("a", "@"), ("b", "@home"), ("c", "@")] {
            scene.mount(&["-o", &format!("subvol={subvol}")], dir);
        }
        let order = order.map(|nr: usize| ["a", "b", "c"][nr]);
        for (nr, dir) in order.into_iter().enumerate() {
            scene.write(&format!("{dir}/f"));
            scene.umount(dir);
            assert!(!scene.is_mounted(dir));
            for other in &order[nr + 1..] {
                scene.write(&format!("{other}/g"));
            }
        }
        // The last one has closed the image.
        let shown = ok(ubtrfs(["cat", &format!("{}:/@home/f", text(&scene.image()))]));
        assert_eq!(shown, "b/f");
        scene.check();
    }
}

#[test]
fn umount_of_one_of_several_mounts_is_durable_when_it_returns() {
    for first in ["a", "b"] {
        let Some(scene) = Scene::new() else { return };
        scene.mount(&["-o", "subvol=@"], "a");
        scene.mount(&["-o", "subvol=@home"], "b");
        scene.write(&format!("{first}/f"));
        scene.umount(first);
        scene.kill("a");
        assert_eq!(scene.stored(if first == "a" { "@/f" } else { "@home/f" }), format!("{first}/f"));
        scene.check();
    }
}

#[test]
fn a_bind_mount_alone_is_still_told_of() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvol=@home"], "b");
    run("mount", ["--bind", &text(&scene.path("b")), &text(&scene.path("c"))]).unwrap();
    scene.umount("b");
    scene.write("c/f");
    let output = ubtrfs(["umount", &text(&scene.path("a"))]);
    refused(&output, &["is unmounted", "on disk", "still mounted", &text(&scene.path("c"))]);
    scene.umount("c");
    assert_eq!(scene.stored("@home/f"), "c/f");
    scene.check();
}

#[test]
fn a_killed_server_leaves_mounts_that_can_be_unmounted() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvol=@home"], "b");
    scene.write("b/f");
    ok(ubtrfs(["sync", &text(&scene.path("a"))]));
    scene.kill("a");
    assert!(fs::read_dir(scene.path("b")).is_err());
    scene.mount(&["-o", "subvol=@home"], "c");
    scene.assert_reads("c/f", "b/f");
    for dir in ["b", "a"] {
        refused(&ubtrfs(["umount", &text(&scene.path(dir))]), &["is unmounted", "does not answer"]);
        assert!(!scene.is_mounted(dir));
    }
    scene.umount("c");
    scene.check();
}

#[test]
fn sigterm_unmounts_all_mounts_and_commits() {
    for sandbox in [&[][..], &["--sandbox"]] {
        for unmounted in [None, Some("a"), Some("b")] {
            let Some(scene) = Scene::new() else { return };
            scene.mount(&[sandbox, &["-o", "subvol=@"]].concat(), "a");
            let server = server_of(&scene.path("a"));
            fs::create_dir(scene.path("a/home")).unwrap();
            scene.mount(&["-o", "subvol=@home"], "a/home");
            scene.mount(&["-o", "subvolid=5"], "b");
            scene.mount(&["-o", "subvol=@home"], "c");
            scene.write("c/f");
            if let Some(dir) = unmounted {
                if dir == "a" {
                    scene.umount("a/home");
                }
                scene.umount(dir);
            }
            run("kill", [&server.to_string()]).unwrap();
            assert_eq!(scene.stored("@home/f"), "c/f", "{sandbox:?} {unmounted:?}");
            for dir in ["a", "a/home", "b", "c"] {
                assert!(!scene.is_mounted(dir), "{sandbox:?} {unmounted:?}: {dir}");
            }
            scene.check();
        }
    }
}

#[test]
fn block_devices_are_mounted_several_times() {
    for options in ["subvol=@", "subvol=@,fuseblk"] {
        let Some(mut scene) = Scene::new() else { return };
        if !capability::kernel_oracle() {
            return;
        }
        let device = LoopDevice::over(&scene.image()).unwrap();
        scene.device = device.path().into();
        scene.mount(&["-o", options], "a");
        scene.mount(&["-o", "subvol=@home"], "b");
        scene.write("a/f");
        scene.write("b/f");
        scene.umount("a");
        scene.mount(&["-o", "subvolid=5"], "a");
        scene.assert_reads("a/@/f", "a/f");
        scene.umount_each(&["b", "a"]);
        drop(device);
        assert_eq!(scene.stored("@home/f"), "b/f");
        scene.check();
    }
}

#[test]
fn other_users_cannot_mount_beside() {
    let Some(scene) = Scene::new() else { return };
    if !capability::program("setpriv") || !capability::program("fusermount3") {
        return;
    }
    let_users_mount();
    let program = scene.path("ubtrfs");
    fs::copy(env!("CARGO_BIN_EXE_ubtrfs"), &program).unwrap();
    for name in ["e.img", "b", "c"] {
        std::os::unix::fs::chown(scene.path(name), Some(65534), Some(65534)).unwrap();
    }
    let as_nobody = |words: &[&str]| {
        let program = text(&program);
        let words = [NOBODY, &[&*program], words].concat();
        Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output().unwrap()
    };
    let (image, b, c) = (text(&scene.image()), text(&scene.path("b")), text(&scene.path("c")));
    scene.mount(&["-o", "subvol=@"], "a");
    let a = text(&scene.path("a"));
    let denied = as_nobody(&["mount", "-o", "subvol=@home", &image, &b]);
    refused(&denied, &["in use", "mounted it on", &a, "only root"]);
    scene.umount("a");

    ok(as_nobody(&["mount", "-o", "subvol=@", &image, &b]));
    let denied = as_nobody(&["mount", "-o", "subvol=@home", &image, &c]);
    refused(&denied, &["in use", "mounted it on", &b, "ubtrfs umount", "only root"]);
    // Root does not enter another user's mount.
    refused(&scene.try_mount(&["-o", "subvol=@home"], "d"), &["in use"]);
    ok(as_nobody(&["umount", &b]));
    scene.check();
}

#[test]
fn subvolumes_and_snapshots_are_made_and_deleted_beside_their_mounts() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvolid=5"], "b");
    scene.write("a/f");
    let at = |name: &str| text(&scene.path(name));
    ok(ubtrfs(["subvolume", "snapshot", "-r", &at("b/@"), &at("b/snap")]));
    scene.assert_reads("b/snap/f", "a/f");
    scene.mount(&["-o", "subvol=snap"], "c");
    scene.assert_reads("c/f", "a/f");
    assert_eq!(fs::write(scene.path("c/g"), "x").unwrap_err().raw_os_error(), Some(30), "EROFS");
    let shown = ok(ubtrfs(["subvolume", "show", &at("c")]));
    assert!(shown.contains("snap"), "{shown}");
    fs::write(scene.path("a/f"), "changed").unwrap();
    scene.assert_reads("c/f", "a/f");
    // A name that moves does not end a mount.
    fs::rename(scene.path("b/@home"), scene.path("b/house")).unwrap();
    scene.mount(&["-o", "subvol=house"], "d");
    fs::rename(scene.path("b/house"), scene.path("b/plain/home")).unwrap();
    assert_eq!(scene.shown("d").unwrap().0, "/plain/home");
    scene.write("d/f");
    scene.assert_reads("b/plain/home/f", "d/f");
    scene.umount("c");
    ok(ubtrfs(["subvolume", "delete", &at("b/snap")]));
    refused(&scene.try_mount(&["-o", "subvol=snap"], "c"), &["does not exist"]);
    scene.umount_each(&["a", "b", "d"]);
    scene.check();
}

#[test]
fn commands_and_paths_are_those_of_the_mount_that_is_named() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvol=@home"], "b");
    scene.write("a/f");
    scene.write("b/f");
    let at = |name: &str| text(&scene.path(name));
    for dir in ["a", "b"] {
        let ino = fs::metadata(scene.path(dir).join("f")).unwrap().ino() & ((1 << 40) - 1);
        let shown = ok(ubtrfs(["inspect", "inode-resolve", &ino.to_string(), &at(dir)]));
        assert_eq!(shown.trim(), at(&format!("{dir}/f")));
    }
    let id = |dir: &str| ok(ubtrfs(["inspect", "rootid", &at(dir)])).trim().to_owned();
    assert_eq!(["a", "b"].map(id), ["256", "257"]);
    ok(ubtrfs(["filesystem", "label", &at("b"), "house"]));
    assert_eq!(ok(ubtrfs(["filesystem", "label", &at("a")])).trim(), "house");
    assert!(ok(ubtrfs(["stats", &at("b")])).contains("commit"));
    let inode = |name: &str| fs::metadata(scene.path(name)).unwrap().ino();
    assert_eq!((inode("a"), inode("b")), (256, 257 << 40 | 256), "the first one has Linux's numbers");
    scene.umount_each(&["a", "b"]);
    scene.check();
}

#[test]
fn a_remount_changes_the_flags_of_one_mount() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvol=@home,ro,nosuid"], "b");
    let has = |dir: &str, flag: &str| scene.shown(dir).unwrap().1.iter().any(|shown| shown == flag);
    assert!(fs::write(scene.path("b/f"), "x").is_err());
    scene.mount(&["-o", "remount,rw,noexec"], "b");
    scene.write("b/f");
    scene.write("a/f");
    assert!(has("b", "noexec") && has("b", "nosuid") && !has("a", "noexec"));
    scene.mount(&["-o", "remount,nodev"], "a");
    assert!(has("a", "nodev") && !has("b", "nodev"));
    // mount(8) passes the options of fstab.
    scene.mount(&["-o", "remount,rw,noexec,nosuid,subvol=/@home"], "b");
    scene.mount(&["-o", "remount,rw,nodev,subvolid=256,subvol=@"], "a");
    for option in ["subvol=@", "subvolid=256", "subvolid=5", "subvol=none"] {
        refused(&scene.try_mount(&["-o", &format!("remount,{option}")], "b"), &[option, "cannot change"]);
    }
    for commit in ["commit=1", "commit=0", "rw,commit=5"] {
        scene.mount(&["-o", &format!("remount,{commit}")], "b");
    }
    refused(&scene.try_mount(&["-o", "remount,commit=soon"], "b"), &["number of seconds"]);
    refused(&scene.try_mount(&["-o", "remount,commit=5,max_inline=9"], "b"), &["max_inline=9", "cannot change"]);
    // What all mounts share, a later mount may name as it is now.
    scene.mount(&["-o", "remount,compress=zstd:5,datasum"], "a");
    scene.umount_each(&["b"]);
    refused(&scene.try_mount(&["-o", "subvol=@home,compress=lzo"], "b"), &["compress=lzo", "differs"]);
    scene.mount(&["-o", "subvol=@home,compress=zstd:5,rw,noexec"], "b");
    // As on Linux, the whole filesystem becomes read-only and writable again, and each mount keeps its own flag.
    scene.mount(&["-o", "remount,ro"], "b");
    assert!(fs::write(scene.path("a/f"), "x").is_err());
    scene.mount(&["-o", "remount,rw"], "a");
    scene.write("a/f");
    assert!(fs::write(scene.path("b/f"), "x").is_err());
    // Nobody asks for ro, so the other mount stays writable.
    scene.mount(&["-o", "remount,noexec"], "b");
    assert!(has("b", "ro") && has("b", "noexec") && fs::write(scene.path("b/f"), "x").is_err());
    scene.write("a/f");
    scene.umount_each(&["a", "b"]);
    scene.check();
}

/// mount(8) calls mount.fuse3 for each line of a table, which calls this program. As in
/// `mount::mount_and_umount_of_the_system_work`, the test does not run mount(8) itself.
#[test]
fn the_lines_of_fstab_mount_the_subvolumes_of_an_image() {
    let Some(scene) = Scene::new() else { return };
    if !capability::program("mount.fuse3") {
        return;
    }
    let program = Path::new(env!("CARGO_BIN_EXE_ubtrfs")).parent().unwrap().display().to_string();
    let path = format!("{program}:{}", std::env::var("PATH").unwrap());
    for (options, dir) in [("noatime,subvol=@", "a"), ("noatime,subvol=@home,nosuid", "b"), ("subvol=@/srv", "c")] {
        let mut helper = Command::new("/usr/sbin/mount.fuse3");
        helper.args([scene.image(), scene.path(dir)]).args(["-o", &format!("rw,{options}"), "-t", "fuse.ubtrfs"]);
        ok(helper.env("PATH", &path).stdin(Stdio::null()).output().unwrap());
    }
    assert_eq!(["a", "b", "c"].map(|dir| scene.shown(dir).unwrap().0), ["/@", "/@home", "/@/srv"]);
    scene.write("b/f");
    // As umount(8) does for each of them.
    for dir in ["a", "b", "c"] {
        run("umount", [&text(&scene.path(dir))]).unwrap();
    }
    assert_eq!(scene.stored("@home/f"), "b/f");
    scene.check();
}

/// At boot, mounts of one image begin at the same time.
#[test]
fn mounts_that_begin_at_the_same_time_find_each_other() {
    let Some(scene) = Scene::new() else { return };
    for _ in 0..4 {
        std::thread::scope(|scope| {
            let mounts = [("a", "subvol=@"), ("b", "subvol=@home"), ("c", "subvol=@/srv"), ("d", "subvolid=5")];
            let begun = mounts.map(|(dir, option)| {
                let scene = &scene;
                scope.spawn(move || scene.try_mount(&["-o", option], dir))
            });
            for mounted in begun {
                ok(mounted.join().unwrap());
            }
        });
        scene.write("a/f");
        scene.assert_reads("d/@/f", "a/f");
        scene.umount_each(&DIRS);
    }
    scene.check();
}

/// The last unmount closes the image while others mount it.
#[test]
fn a_mount_during_the_last_unmount_waits_for_it() {
    let Some(scene) = Scene::new() else { return };
    std::thread::scope(|scope| {
        for (dir, option) in [("a", "subvol=@"), ("b", "subvol=@home"), ("c", "subvol=@/srv")] {
            let scene = &scene;
            scope.spawn(move || {
                for round in 0..12 {
                    ok(scene.try_mount(&["-o", option], dir));
                    scene.write(&format!("{dir}/f{round}"));
                    scene.umount(dir);
                    assert!(!scene.is_mounted(dir));
                }
            });
        }
    });
    scene.mount(&["-o", "subvolid=5"], "d");
    for name in ["@/f11", "@home/f11", "@/srv/f11"] {
        assert!(scene.path("d").join(name).exists(), "{name}");
    }
    scene.umount("d");
    scene.check();
}

/// NFS servers and backup programs open files by handles, also those that the kernel has forgotten.
#[test]
fn file_handles_lead_to_files_of_every_mount() {
    if !capability::program("python3") {
        return;
    }
    const OPEN: &str = "import ctypes, os, sys\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        mount, path = sys.argv[1:]\n\
        handle, mount_id = ctypes.create_string_buffer(bytes([128, 0, 0, 0]) + bytes(132)), ctypes.c_int()\n\
        assert libc.name_to_handle_at(-100, path.encode(), handle, ctypes.byref(mount_id), 0) == 0\n\
        open('/proc/sys/vm/drop_caches', 'w').write('2')\n\
        at = os.open(mount, os.O_RDONLY)\n\
        fd = libc.open_by_handle_at(at, handle, os.O_RDONLY)\n\
        assert fd >= 0, os.strerror(ctypes.get_errno())\n\
        print(os.readlink(f'/proc/self/fd/{fd}'))\n";
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    scene.mount(&["-o", "subvol=@home"], "b");
    for dir in ["a", "b"] {
        fs::create_dir_all(scene.path(dir).join("one/two")).unwrap();
        let opened = ["one/two", "one", ""].map(|name| {
            let path = text(&scene.path(dir).join(name));
            let path = path.trim_end_matches('/').to_owned();
            let said = Command::new("python3").args(["-c", OPEN, &text(&scene.path(dir)), &path]).output().unwrap();
            (ok(said).trim().to_owned(), path)
        });
        for (opened, path) in opened {
            assert_eq!(opened, path);
        }
    }
    scene.umount_each(&["a", "b"]);
    scene.check();
}

/// A path is no identity: after a file takes the place of another one, the mount of the old file goes on.
#[test]
fn an_image_that_took_the_path_of_a_mounted_one_is_mounted_by_itself() {
    let Some(scene) = Scene::new() else { return };
    scene.mount(&["-o", "subvol=@"], "a");
    let old = scene.path("old.img");
    fs::rename(scene.image(), &old).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &text(&scene.image())]));
    scene.mount(&[], "b");
    scene.write("b/new");
    assert!(!scene.path("b/@").exists(), "it is the new image");
    // The old image is found by its new path.
    ok(ubtrfs(["mount", "-o", "subvolid=5", &text(&old), &text(&scene.path("c"))]));
    assert!(scene.path("c/@").exists());
    scene.umount_each(&["b", "a", "c"]);
    btrfs_check(&old).unwrap();
    scene.check();
}

/// The kernel asks for the path of the subvolume while the first mount is placed.
#[test]
fn a_server_with_one_thread_mounts_a_subvolume_too() {
    for options in [&["-o", "subvol=@,noio_uring,threads=1"][..], &["--sandbox", "-o", "subvol=@,noio_uring,threads=1"]]
    {
        let Some(scene) = Scene::new() else { return };
        scene.mount(options, "a");
        scene.write("a/f");
        scene.umount("a");
        assert_eq!(scene.stored("@/f"), "a/f");
        scene.check();
    }
}

/// mount(8) runs a helper for each line of fstab. For the same mount again, it expects success with `-a`, and fails
/// otherwise, as for Linux's btrfs.
#[test]
fn a_second_mount_of_the_same_subvolume_is_passed_over_by_mount_a_and_refused_otherwise() {
    let Some(scene) = Scene::new() else { return };
    let helper = scene.path("mount.ubtrfs");
    symlink(env!("CARGO_BIN_EXE_ubtrfs"), &helper).unwrap();
    // A shell with the name and the options of mount(8).
    let by_mount = |options: &str, subvol: &str| {
        let mut command = Command::new("bash");
        command.args(["-c", &format!(r#"exec -a mount sh {options} -c '"$@"; exit $?' sh "$@""#), "bash"]);
        command.arg(&helper).arg(&scene.device).arg(scene.path("b")).args(["-o", subvol]);
        command.env("LC_ALL", "C").stdin(Stdio::null()).output().unwrap()
    };
    ok(by_mount("-a", "subvol=@home"));
    fs::write(scene.path("b/file"), "text").unwrap();
    let nr_mounts = || {
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        table.lines().filter(|line| line.split(' ').nth(1) == Some(&text(&scene.path("b")))).count()
    };
    ok(by_mount("-a", "subvol=@home"));
    ok(by_mount("-a", "subvol=/@home,noatime"));
    assert_eq!(nr_mounts(), 1);
    let words = [&*format!("{} is mounted on", text(&scene.device)), "already", "ubtrfs umount"];
    let by_helper = by_mount("", "subvol=@home");
    assert_eq!(by_helper.status.code(), Some(32), "the status of mount(8)");
    let stderr = String::from_utf8_lossy(&by_helper.stderr).into_owned();
    assert!(words.iter().all(|word| stderr.contains(word)) && stderr.lines().count() == 1, "{stderr}");
    assert_eq!(by_mount("", "subvol=missing").status.code(), Some(32), "of every failure");
    refused(&scene.try_mount(&["-o", "subvolid=257"], "b"), &words);
    assert_eq!(nr_mounts(), 1);
    // Another subvolume is another mount.
    scene.mount(&["-o", "subvol=@,nonempty"], "b");
    assert_eq!(nr_mounts(), 2);
    scene.umount_each(&["b", "b"]);
    btrfs_check(&scene.image()).unwrap();
}
