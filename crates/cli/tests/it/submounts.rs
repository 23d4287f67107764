//! Tests of `-o submounts`: each subvolume is a mount of its own, made when it is entered. Every test ends without mounts,
//! and with an image that `btrfs check` accepts.
//!
//! The image has the subvolumes `a`, `a/n` and `dir/b`, the snapshot `dir/s` of `a`, and a file in each subvolume.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_testkit::{LoopMount, btrfs_check, capability, run};

use crate::common::{NOBODY, namespace, namespace_with, ok, refused, server_of, text, ubtrfs};

struct Scene {
    scratch: TempDir,
}

impl Scene {
    /// `None` if FUSE or root is missing here. The image is mounted on `m`.
    fn new() -> Option<Self> {
        if !capability::fuse() || !capability::root() {
            return None;
        }
        let scratch = TempDir::with_prefix("ubtrfs-submounts-").unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["m", "other"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        let scene = Self { scratch };
        ok(ubtrfs(["mkfs", "-q", "-b", "512M", &text(&scene.image())]));
        scene.mount("submounts");
        fs::create_dir(scene.path("m/dir")).unwrap();
        for name in ["m/a", "m/a/n", "m/dir/b"] {
            scene.run(&["subvolume", "create", name]);
            fs::write(scene.path(name).join("file"), name).unwrap();
        }
        fs::write(scene.path("m/top"), "top").unwrap();
        scene.run(&["subvolume", "snapshot", "m/a", "m/dir/s"]);
        Some(scene)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("e.img")
    }

    #[track_caller]
    fn mount(&self, options: &str) {
        ok(ubtrfs(["mount", "-o", options, &text(&self.image()), &text(&self.path("m"))]));
    }

    /// Runs a command whose operands that begin with `m` are paths in the scratch folder.
    #[track_caller]
    fn run(&self, args: &[&str]) -> String {
        let args = args.iter().map(|arg| match arg.strip_prefix('m') {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => text(&self.path(arg)),
            _ => (*arg).to_owned(),
        });
        ok(ubtrfs(args))
    }

    #[track_caller]
    fn umount(&self) {
        ok(ubtrfs(["umount", &text(&self.path("m"))]));
    }

    /// The directories of mounts in the scratch folder, without its path.
    fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dirs =
            table.lines().filter_map(|line| Path::new(line.split(' ').nth(4)?).strip_prefix(self.scratch.path()).ok());
        dirs.map(text).collect()
    }

    fn stat(&self, name: &str) -> (u64, u64) {
        let meta = fs::symlink_metadata(self.path(name)).unwrap();
        (meta.dev(), meta.ino())
    }

    /// Unmounts all submounts, so that the next path walk makes them again.
    fn leave_all(&self) {
        for dir in self.mounts().iter().rev().filter(|dir| dir.starts_with("m/")) {
            let _ = run("umount", [self.path(dir)]);
        }
    }

    /// Waits for the end of the server.
    #[track_caller]
    fn await_end(&self) {
        let begun = Instant::now();
        while !ubtrfs_device::is_unlocked(&self.image()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "the server ends");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if thread::panicking() {
            for dir in self.mounts().iter().rev() {
                let _ = run("umount", ["-l".as_ref(), self.path(dir).as_os_str()]);
            }
            return;
        }
        self.await_end();
        assert_eq!(self.mounts(), Vec::<String>::new(), "no mount is left");
        btrfs_check(&self.image()).unwrap();
    }
}

fn errno<T>(done: std::io::Result<T>) -> Option<Errno> {
    done.err().and_then(|error| Errno::from_io_error(&error))
}

/// The output of a program, without the path of the tree.
fn said(program: &str, args: &[&str], tree: &Path) -> Vec<String> {
    let args: Vec<String> = args.iter().map(|arg| arg.replace("TREE", &text(tree))).collect();
    let output = run(program, args).unwrap().replace(&text(tree), "TREE");
    let mut lines: Vec<String> = output.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The lines of `PATH DEVICE:INODE`, with the devices numbered in the order of the paths. On Linux, the empty directory in
/// place of a subvolume (inode 2) has a device of its own, which has no number here.
fn numbered(lines: &[String]) -> Vec<String> {
    let mut devices = BTreeMap::new();
    let mut number = |line: &String| {
        let (path, numbers) = line.rsplit_once(' ').unwrap();
        let (device, inode) = numbers.split_once(':').unwrap();
        if inode == "2" {
            return format!("{path} 2");
        }
        let next = devices.len();
        format!("{path} {}:{inode}", devices.entry(device.to_owned()).or_insert(next))
    };
    lines.iter().map(&mut number).collect()
}

#[test]
fn a_tree_looks_as_on_linux() {
    let Some(scene) = Scene::new().filter(|_| capability::kernel_oracle()) else { return };
    let views: [(&str, &[&str]); 4] = [
        ("find", &["TREE", "-printf", "%p %D:%i\\n"]),
        ("find", &["TREE", "-xdev"]),
        ("stat", &["-c", "%n %d:%i", "TREE/dir/s", "TREE/dir/s/n", "TREE/dir/s/file", "TREE/a/n/file"]),
        ("sh", &["-c", "ls -i -A TREE TREE/dir TREE/dir/s"]),
    ];
    let look = |tree: &Path| -> Vec<Vec<String>> {
        let of = |(program, args): &(&str, &[&str])| {
            let lines = said(program, args, tree);
            if args.contains(&"-xdev") || args.contains(&"-c") && *program == "sh" { lines } else { numbered(&lines) }
        };
        views.iter().map(of).collect()
    };
    // From the caches of the commands above, from nothing, and with all mounts in place.
    let here = look(&scene.path("m"));
    scene.leave_all();
    assert_eq!(look(&scene.path("m")), here, "without mounts");
    assert_eq!(look(&scene.path("m")), here, "with mounts");
    scene.umount();
    scene.await_end();
    let linux = LoopMount::new(&scene.image(), "ro").unwrap();
    assert_eq!(here, look(linux.path()));
}

#[test]
fn programs_that_stay_on_one_device_leave_subvolumes_out() {
    let Some(scene) = Scene::new() else { return };
    let tree = scene.path("m");
    fs::write(scene.path("m/a/large"), vec![1; 1 << 20]).unwrap();
    let sizes = ["-sk", "-skx"].map(|how| {
        let shown = run("du", [how.as_ref(), tree.as_os_str()]).unwrap();
        shown.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    });
    assert!(sizes[0] >= 1024 && sizes[1] < 1024, "{sizes:?}");
    let listed = run("sh", ["-c", &format!("cd {} && tar --one-file-system -c . | tar -t", text(&tree))]).unwrap();
    assert!(listed.contains("./a/") && listed.contains("./top") && !listed.contains("file"), "{listed}");
    run("cp", ["-ax".as_ref(), tree.as_os_str(), scene.path("other/copy").as_os_str()]).unwrap();
    assert!(scene.path("other/copy/dir/b").is_dir() && !scene.path("other/copy/dir/b/file").exists());
    let shown = run("df", ["--output=target".as_ref(), scene.path("m/a/n").as_os_str()]).unwrap();
    assert!(shown.contains("m/a/n"), "{shown}");
    scene.umount();
}

#[test]
fn every_way_into_a_subvolume_mounts_it() {
    let Some(scene) = Scene::new() else { return };
    let b = scene.path("m/dir/b");
    let ways: [(&str, &dyn Fn()); 12] = [
        ("stat", &|| assert_eq!(fs::symlink_metadata(&b).unwrap().ino(), 256)),
        ("read a file", &|| assert_eq!(fs::read_to_string(b.join("file")).unwrap(), "m/dir/b")),
        ("list", &|| assert_eq!(fs::read_dir(&b).unwrap().count(), 1)),
        ("create", &|| fs::write(b.join("new"), "x").unwrap()),
        ("rename", &|| fs::rename(b.join("new"), b.join("newer")).unwrap()),
        ("unlink", &|| fs::remove_file(b.join("newer")).unwrap()),
        ("make a directory", &|| fs::create_dir(b.join("d")).unwrap()),
        ("remove a directory", &|| fs::remove_dir(b.join("d")).unwrap()),
        ("change the mode", &|| fs::set_permissions(&b, fs::Permissions::from_mode(0o711)).unwrap()),
        ("statfs", &|| drop(run("stat", ["-f".as_ref(), b.as_os_str()]).unwrap())),
        ("work there", &|| assert!(Command::new("true").current_dir(&b).status().unwrap().success())),
        ("a command", &|| drop(ok(ubtrfs(["subvolume", "show", &text(&b)])))),
    ];
    for (way, enter) in ways {
        scene.leave_all();
        assert_eq!(scene.mounts(), ["m"]);
        println!("{way}");
        enter();
        assert!(scene.mounts().contains(&"m/dir/b".to_owned()), "{way}: {:?}", scene.mounts());
    }
    scene.umount();
}

#[test]
fn nested_subvolumes_are_entered_in_one_walk() {
    let Some(scene) = Scene::new() else { return };
    let (mut path, mut deep) = (String::from("m/a/n"), Vec::new());
    for level in 0..6 {
        path = format!("{path}/{level}");
        scene.run(&["subvolume", "create", &path]);
        deep.push(path.clone());
    }
    fs::write(scene.path(&path).join("file"), "deep").unwrap();
    for from_nothing in [false, true] {
        scene.leave_all();
        if from_nothing {
            scene.umount();
            scene.mount("submounts");
        }
        assert_eq!(fs::read_to_string(scene.path(&path).join("file")).unwrap(), "deep");
        assert!(deep.iter().all(|path| scene.mounts().contains(path)), "{:?}", scene.mounts());
    }
    scene.umount();
}

#[test]
fn a_directory_that_is_opened_as_a_path_is_the_subvolume() {
    let Some(scene) = Scene::new() else { return };
    scene.umount();
    scene.mount("submounts");
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut dir = rustix::fs::open(scene.path("m"), flags, Mode::empty()).unwrap();
    for name in ["a", "n"] {
        dir = rustix::fs::openat(&dir, name, flags, Mode::empty()).unwrap();
        assert_eq!(rustix::fs::fstat(&dir).unwrap().st_ino, 256, "{name}");
    }
    rustix::fs::openat(&dir, "file", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    drop(dir);
    scene.run(&["subvolume", "create", "m/new"]);
    let begun = Instant::now();
    let is_there = || {
        let new = rustix::fs::open(scene.path("m/new"), flags, Mode::empty()).unwrap();
        rustix::fs::fstat(&new).is_ok_and(|stat| stat.st_ino == 256)
    };
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
    scene.umount();
}

#[test]
fn an_idle_submount_is_unmounted_and_a_used_one_stays() {
    let Some(scene) = Scene::new() else { return };
    let file = fs::File::open(scene.path("m/a/file")).unwrap();
    fs::metadata(scene.path("m/dir/b")).unwrap();
    let begun = Instant::now();
    while scene.mounts() != ["m", "m/a"] {
        assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", scene.mounts());
        thread::sleep(Duration::from_millis(100));
    }
    drop(file);
    // Plain umount succeeds when all submounts have gone.
    while run("umount", [scene.path("m")]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(80), "{:?}", scene.mounts());
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn umount_unmounts_submounts_first_unless_one_is_in_use() {
    let Some(scene) = Scene::new() else { return };
    let file = fs::File::open(scene.path("m/a/n/file")).unwrap();
    refused(&ubtrfs(["umount", &text(&scene.path("m"))]), &["busy", &text(&scene.path("m/a/n"))]);
    assert_eq!(fs::read_to_string(scene.path("m/dir/b/file")).unwrap(), "m/dir/b", "it still works");
    drop(file);
    scene.umount();
    scene.mount("submounts");
    fs::metadata(scene.path("m/a/n")).unwrap();
    run("umount", ["-R".as_ref(), scene.path("m").as_os_str()]).unwrap();
    scene.await_end();
    scene.mount("submounts");
    fs::metadata(scene.path("m/a/n")).unwrap();
    run("kill", [server_of(&scene.path("m")).to_string()]).unwrap();
}

#[test]
fn a_bind_mount_of_a_subvolume_keeps_the_filesystem_in_use() {
    let Some(scene) = Scene::new() else { return };
    run("mount", ["--bind".as_ref(), scene.path("m/a").as_os_str(), scene.path("other").as_os_str()]).unwrap();
    assert_eq!(scene.stat("m/a"), scene.stat("other"), "one filesystem");
    fs::write(scene.path("other/new"), "by the bind mount").unwrap();
    assert_eq!(fs::read_to_string(scene.path("m/a/new")).unwrap(), "by the bind mount");
    assert_eq!(scene.stat("other/n").1, 256, "a subvolume is mounted in each place");
    refused(&ubtrfs(["umount", &text(&scene.path("m"))]), &["still mounted on", "other"]);
    assert_eq!(fs::read_to_string(scene.path("other/n/file")).unwrap(), "m/a/n");
    ok(ubtrfs(["umount", &text(&scene.path("other"))]));
}

#[test]
fn a_dead_server_leaves_mounts_that_one_umount_removes() {
    let Some(scene) = Scene::new() else { return };
    fs::metadata(scene.path("m/a/n")).unwrap();
    run("kill", ["-9", &server_of(&scene.path("m")).to_string()]).unwrap();
    scene.await_end();
    let said = ubtrfs(["umount", &text(&scene.path("m"))]);
    refused(&said, &["its last changes may be lost"]);
}

#[test]
fn a_subvolume_is_renamed_and_removed_although_it_was_entered() {
    let Some(scene) = Scene::new() else { return };
    let (m, enter) = (scene.path("m"), |name: &str| assert_eq!(scene.stat(name).1, 256, "{name}"));
    enter("m/a");
    fs::rename(m.join("a"), m.join("a2")).unwrap();
    enter("m/a2/n");
    fs::rename(m.join("a2"), m.join("dir/a3")).unwrap();
    enter("m/dir/a3");
    fs::rename(m.join("dir"), m.join("dir2")).unwrap();
    assert_eq!(fs::read_to_string(m.join("dir2/a3/n/file")).unwrap(), "m/a/n");
    let open = fs::File::open(m.join("dir2/b/file")).unwrap();
    assert_eq!(errno(fs::rename(m.join("dir2/b"), m.join("b2"))), Some(Errno::BUSY), "in use");
    drop(open);
    fs::rename(m.join("dir2/b"), m.join("b2")).unwrap();
    assert_eq!(errno(fs::remove_dir(m.join("b2"))), Some(Errno::NOTEMPTY));
    fs::remove_file(m.join("b2/file")).unwrap();
    fs::remove_dir(m.join("b2")).unwrap();
    assert!(!m.join("b2").exists());
    scene.umount();
}

#[test]
fn a_subvolume_in_use_can_be_deleted_and_its_open_files_stay() {
    let Some(scene) = Scene::new() else { return };
    let open = fs::File::open(scene.path("m/dir/b/file")).unwrap();
    scene.run(&["subvolume", "delete", "m/dir/b"]);
    assert!(!scene.path("m/dir/b").exists());
    assert_eq!(std::io::read_to_string(&open).unwrap(), "m/dir/b");
    scene.run(&["subvolume", "create", "m/dir/b"]);
    assert_eq!(fs::read_dir(scene.path("m/dir/b")).unwrap().count(), 0, "the new one");
    drop(open);
    scene.run(&["subvolume", "delete", "m/a/n"]);
    scene.run(&["subvolume", "delete", "m/a", "m/dir/s"]);
    assert_eq!(scene.run(&["subvolume", "list", "m"]).lines().count(), 1);
    scene.umount();
}

#[test]
fn commands_take_paths_in_several_submounts() {
    let Some(scene) = Scene::new() else { return };
    scene.run(&["subvolume", "snapshot", "-r", "m/a", "m/dir/b/r"]);
    assert_eq!(fs::read_to_string(scene.path("m/dir/b/r/file")).unwrap(), "m/a");
    assert_eq!(errno(fs::write(scene.path("m/dir/b/r/x"), "")), Some(Errno::ROFS));
    let stream = text(&scene.path("stream"));
    scene.run(&["send", "-q", "m/dir/b/r", "-f", &stream]);
    scene.run(&["receive", "-q", "-f", &stream, "m/a/n"]);
    assert_eq!(fs::read_to_string(scene.path("m/a/n/r/file")).unwrap(), "m/a");
    let list = scene.run(&["subvolume", "list", "m"]);
    assert!(list.contains("path a/n/r") && list.contains("path dir/b/r"), "{list}");
    assert!(scene.run(&["subvolume", "show", "m/a/n/r"]).starts_with("a/n/r\n"));
    fs::write(scene.path("m/a/big"), vec![7; 1 << 20]).unwrap();
    scene.run(&["filesystem", "clone", "m/a/big", "m/dir/b/clone"]);
    assert_eq!(fs::read(scene.path("m/dir/b/clone")).unwrap(), vec![7; 1 << 20]);
    scene.umount();
}

#[test]
fn changes_across_submounts_are_refused_as_between_filesystems() {
    let Some(scene) = Scene::new() else { return };
    let (from, to) = (scene.path("m/a/file"), scene.path("m/dir/b/moved"));
    scene.leave_all();
    assert_eq!(errno(fs::rename(&from, &to)), Some(Errno::XDEV));
    assert_eq!(errno(fs::hard_link(&from, &to)), Some(Errno::XDEV));
    fs::copy(&from, &to).unwrap();
    assert_eq!(fs::read_to_string(&to).unwrap(), "m/a");
    scene.umount();
}

#[test]
fn submounts_have_the_flags_of_the_mount() {
    let Some(scene) = Scene::new() else { return };
    scene.umount();
    scene.mount("submounts,nosuid,nodev,noexec,noatime");
    fs::metadata(scene.path("m/a/n")).unwrap();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let flags = |dir: &str| {
        let dir = text(&scene.path(dir));
        table.lines().find(|line| line.split(' ').nth(4) == Some(&dir)).unwrap().split(' ').nth(5).unwrap().to_owned()
    };
    assert_eq!(flags("m"), "rw,nosuid,nodev,noexec,noatime");
    assert_eq!((flags("m/a"), flags("m/a/n")), (flags("m"), flags("m")));
    let file = fs::File::open(scene.path("m/a/file")).unwrap();
    ok(ubtrfs(["mount", "-o", "remount,ro", &text(&scene.image()), &text(&scene.path("m"))]));
    let begun = Instant::now();
    while errno(fs::write(scene.path("m/a/x"), "")) != Some(Errno::ROFS) {
        assert!(begun.elapsed() < Duration::from_secs(20), "a submount follows a remount");
        thread::sleep(Duration::from_millis(100));
    }
    drop(file);
    scene.umount();
    scene.mount("submounts,ro");
    assert_eq!(errno(fs::write(scene.path("m/a/n/x"), "")), Some(Errno::ROFS));
    scene.umount();
}

#[test]
fn a_remount_makes_all_submounts_read_only_or_none() {
    let Some(scene) = Scene::new() else { return };
    let names = ["m/x", "m/a/x", "m/a/n/x", "m/dir/b/x"];
    let remount = |how: &str| ubtrfs(["mount", "-o", how, &text(&scene.image()), &text(&scene.path("m"))]);
    let mut file = fs::File::options().append(true).open(scene.path("m/a/file")).unwrap();
    fs::metadata(scene.path("m/dir/b")).unwrap();
    refused(&remount("remount,ro"), &[&text(&scene.path("m/a")), "nothing was changed"]);
    for name in names {
        fs::write(scene.path(name), "").unwrap();
    }
    std::io::Write::write_all(&mut file, b"!").unwrap();
    drop(file);
    ok(remount("remount,ro"));
    for name in names {
        assert_eq!(errno(fs::write(scene.path(name), "")), Some(Errno::ROFS), "{name}");
    }
    ok(remount("remount,rw"));
    let begun = Instant::now();
    while names.iter().any(|name| fs::write(scene.path(name), "").is_err()) {
        // A submount is writable again at the latest after it was unmounted.
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_secs(11));
    }
    assert_eq!(fs::read_to_string(scene.path("m/a/file")).unwrap(), "m/a!");
    scene.umount();
}

#[test]
fn a_user_cannot_use_up_the_views_of_all() {
    const LIMIT: usize = 256;
    let Some(scene) = Scene::new() else { return };
    let dir = scene.path("m/u");
    fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(65534), Some(65534)).unwrap();
    let names: Vec<PathBuf> = (0..=LIMIT).map(|number| dir.join(format!("v{number}"))).collect();
    let mut create = Command::new(NOBODY[0]);
    create.args(&NOBODY[1..]).arg(env!("CARGO_BIN_EXE_ubtrfs")).args(["subvolume", "create"]).args(&names);
    ok(create.output().unwrap());
    let mut held: Vec<fs::File> = names[..LIMIT].iter().map(|name| fs::File::open(name.join(".")).unwrap()).collect();
    assert_eq!(errno(fs::File::open(names[LIMIT].join("."))), Some(Errno::MFILE));
    assert_eq!(fs::read_to_string(scene.path("m/dir/b/file")).unwrap(), "m/dir/b", "root is not concerned");
    held.clear();
    let begun = Instant::now();
    while let Err(error) = fs::File::open(names[LIMIT].join(".")) {
        assert!(begun.elapsed() < Duration::from_secs(20), "{error}");
        thread::sleep(Duration::from_millis(200));
    }
    scene.umount();
}

/// The kernel asks for the ACL of a directory that belongs to another user than the mounter.
#[test]
fn i4_a_subvolume_of_another_user_is_entered_at_once() {
    let Some(scene) = Scene::new() else { return };
    for name in ["m/a", "m/a/n"] {
        std::os::unix::fs::chown(scene.path(name), Some(65534), Some(65534)).unwrap();
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(0o2770)).unwrap();
    }
    scene.leave_all();
    let begun = Instant::now();
    assert_eq!(scene.stat("m/a").1, 256);
    assert_eq!(scene.stat("m/a/n").1, 256);
    assert_eq!(fs::read_dir(scene.path("m/dir/b/.")).unwrap().count(), 1);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let mut command = std::process::Command::new(NOBODY[0]);
    let made = command.args(&NOBODY[1..]).arg("mkdir").arg(scene.path("m/a/n/by-nobody")).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    scene.umount();
}

#[test]
fn i10_a_submount_has_the_restrictions_of_the_bind_mount_that_it_lies_in() {
    let Some(scene) = Scene::new() else { return };
    run("mount", ["--bind".into(), scene.path("m"), scene.path("other")]).unwrap();
    run("mount", ["-o".into(), "remount,bind,ro,nosuid,nodev".into(), scene.path("other")]).unwrap();
    let flags = |dir: &str| {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dir = text(&scene.path(dir));
        let line = table.lines().find(|line| line.split(' ').nth(4) == Some(&dir)).map(str::to_owned);
        line.and_then(|line| line.split(' ').nth(5).map(str::to_owned)).unwrap_or_default()
    };
    // The kernel does not know the stubs below a new bind mount yet.
    let begun = Instant::now();
    let file = loop {
        match ["other/a", "other/a/n"].iter().try_for_each(|dir| fs::metadata(scene.path(dir)).map(drop)) {
            Ok(()) => break fs::File::open(scene.path("other/a/n/file")).unwrap(),
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(30), "{error}"),
        }
    };
    // Longer than the time after which submounts are looked at.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(13) {
        for dir in ["other/a", "other/a/n"] {
            assert!(flags(dir).starts_with("ro,nosuid,nodev"), "{dir}: {}", flags(dir));
            assert_eq!(errno(fs::write(scene.path(dir).join("x"), "")), Some(Errno::ROFS), "{dir}");
        }
        thread::sleep(Duration::from_millis(500));
    }
    assert!(fs::write(scene.path("m/a/x"), "").is_ok());
    drop(file);
    for dir in ["other/a/n", "other/a", "other"] {
        run("umount", ["-l".into(), scene.path(dir)]).unwrap();
    }
    scene.umount();
}

#[test]
fn i11_a_mount_that_others_put_on_a_submount_stays() {
    let Some(scene) = Scene::new() else { return };
    for dir in ["m/a", "m/dir/b"] {
        fs::set_permissions(scene.path(dir), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let below = scene.path("m/dir/b/below");
    fs::create_dir(&below).unwrap();
    for dir in [&scene.path("m/a"), &below] {
        run("mount", ["-t".into(), "tmpfs".into(), "tmpfs".into(), dir.clone()]).unwrap();
        fs::write(dir.join("precious"), "x").unwrap();
    }
    let is_there = || scene.path("m/a/precious").exists() && below.join("precious").exists();
    // The kernel refuses the rename too, after the server was asked for the name.
    assert_eq!(errno(fs::rename(scene.path("m/a"), scene.path("m/z"))), Some(Errno::BUSY));
    let user = |script: &str| {
        Command::new(NOBODY[0])
            .args(&NOBODY[1..])
            .args(["sh", "-c", script])
            .current_dir(scene.path("m"))
            .output()
            .unwrap()
    };
    assert!(!user("mv -T a z").status.success() && !user("rmdir a").status.success());
    assert!(is_there(), "after a rename");
    let said = ubtrfs(["umount", &text(&scene.path("m"))]);
    refused(&said, &["busy"]);
    assert!(is_there(), "after umount");
    // Longer than the time after which idle submounts are unmounted.
    thread::sleep(Duration::from_secs(13));
    assert!(is_there(), "after the idle time");
    for dir in [&scene.path("m/a"), &below] {
        run("umount", [dir]).unwrap();
    }
    assert_eq!(fs::read_to_string(scene.path("m/a/file")).unwrap(), "m/a");
    scene.umount();
}

/// Works in another mount namespace: sees `m` read-only, waits, and writes to a submount.
const SLAVE: &str = r#"
    mount -o remount,bind,ro,nosuid m && echo ready && read x
    ls m/a
    echo x > m/a/there
    grep -c "$PWD/m/a" /proc/self/mountinfo"#;

#[test]
fn i12_a_submount_does_not_appear_where_it_would_lack_restrictions() {
    let Some(scene) = Scene::new() else { return };
    scene.umount();
    let dir = scene.scratch.path();
    run("mount", ["--bind".as_ref(), dir.as_os_str(), dir.as_os_str()]).unwrap();
    run("mount", ["--make-shared".as_ref(), dir.as_os_str()]).unwrap();
    scene.mount("submounts");
    let bind = scene.path("other");
    run("mount", ["--bind".into(), scene.path("m"), bind.clone()]).unwrap();
    run("mount", ["-o".into(), "remount,bind,ro,nosuid,nodev".into(), bind.clone()]).unwrap();
    // As systemd's services have it.
    let mut slave = namespace_with("slave", dir);
    slave.args(["sh", "-c", SLAVE]);
    let slave = slave.current_dir(dir).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut slave = slave.stderr(std::process::Stdio::null()).spawn().unwrap();
    let mut said = std::io::BufReader::new(slave.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    for name in ["m/a", "m/a/n"] {
        assert_eq!(scene.stat(name).1, 256);
    }
    // It makes those in the bind mount at the latest when they are entered.
    let begun = Instant::now();
    while fs::metadata(bind.join("a/n/.")).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    for name in ["new", "a/new", "a/n/new"] {
        assert_eq!(errno(fs::write(bind.join(name), "")), Some(Errno::ROFS), "{name}");
    }
    drop(slave.stdin.take());
    assert_eq!(std::io::read_to_string(said).unwrap(), "0\n", "no submount is propagated");
    slave.wait().unwrap();
    assert!(!scene.path("m/a/there").exists());
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let other = text(&bind);
    let writable = |line: &&str| {
        let fields: Vec<&str> = line.split(' ').collect();
        fields[4].starts_with(&other) && !fields[5].starts_with("ro,nosuid,nodev")
    };
    assert_eq!(table.lines().find(writable), None);
    run("umount", ["-R".into(), bind]).unwrap();
    scene.umount();
    scene.await_end();
    run("umount", [dir]).unwrap();
}

/// The mounter makes submounts while the remover reads the table of mounts.
#[test]
fn i8_submounts_that_are_made_during_a_removal_are_unmounted_later() {
    let Some(scene) = Scene::new() else { return };
    let m = scene.path("m");
    for number in 0..40 {
        scene.run(&["subvolume", "create", &format!("m/v{number}")]);
        fs::write(m.join(format!("v{number}/f")), "x").unwrap();
    }
    let until = Instant::now() + Duration::from_secs(15);
    thread::scope(|scope| {
        for worker in 0..4 {
            let m = &m;
            scope.spawn(move || {
                while Instant::now() < until {
                    for number in (worker..40).step_by(4) {
                        let names = [m.join(format!("v{number}")), m.join(format!("w{number}"))];
                        for (from, to) in [(&names[0], &names[1]), (&names[1], &names[0])] {
                            let _ = fs::metadata(from.join("f")).and_then(|_| fs::rename(from, to));
                        }
                    }
                }
            });
        }
    });
    let begun = Instant::now();
    while scene.mounts() != ["m"] {
        assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", scene.mounts());
        thread::sleep(Duration::from_millis(200));
    }
    scene.umount();
}

#[test]
fn a_new_mount_namespace_has_the_submounts_that_it_was_made_with() {
    let Some(scene) = Scene::new() else { return };
    fs::metadata(scene.path("m/a")).unwrap();
    let mut elsewhere = namespace(scene.scratch.path());
    elsewhere.args(["sh", "-c", "sleep 12 && cat m/a/file"]).current_dir(scene.scratch.path());
    let said = elsewhere.output().unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&said), "m/a", "its copy stays while the mount here is idle");
    assert_eq!(fs::read_to_string(scene.path("m/a/file")).unwrap(), "m/a");
    scene.umount();
}

#[test]
fn submounts_are_refused_where_they_cannot_work() {
    let Some(scene) = Scene::new() else { return };
    scene.umount();
    let (image, dir) = (text(&scene.image()), text(&scene.path("m")));
    let try_mount = |args: &[&str]| ubtrfs([&["mount"], args, &[&image, &dir]].concat());
    refused(&try_mount(&["-o", "submounts", "--sandbox"]), &["submounts", "confined"]);
    refused(&try_mount(&["-o", "submounts,idmap"]), &["submounts", "idmap"]);
    refused(&try_mount(&["-o", "submounts,fuseblk"]), &["submounts", "fuseblk"]);
    let mut user = Command::new(NOBODY[0]);
    user.args(&NOBODY[1..]).arg(env!("CARGO_BIN_EXE_ubtrfs")).args(["mount", "-o", "submounts", &image, &dir]);
    refused(&user.output().unwrap(), &["submounts", "only root"]);
    scene.mount("submounts");
    let other = text(&scene.path("other"));
    refused(&ubtrfs(["mount", "-o", "submounts,subvol=a", &image, &other]), &["mount --bind"]);
    ok(ubtrfs(["mount", "-o", "submounts", &image, &other]));
    assert_eq!((scene.stat("other"), scene.stat("other/a/n")), (scene.stat("m"), scene.stat("m/a/n")));
    ok(ubtrfs(["umount", &other]));
    scene.umount();
}

/// Threads that create, enter, snapshot, rename and delete subvolumes, while others walk through them.
#[test]
fn a_storm_of_changes_leaves_no_mounts() {
    let Some(scene) = Scene::new() else { return };
    let (is_over, walks, changes) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let m = scene.path("m");
    thread::scope(|scope| {
        for number in 0..3 {
            let (m, is_over, changes) = (&m, &is_over, &changes);
            scope.spawn(move || {
                let (own, moved, snapshot) =
                    (m.join(format!("s{number}")), m.join(format!("dir/t{number}")), m.join(format!("a/u{number}")));
                while !is_over.load(Ordering::Relaxed) {
                    ok(ubtrfs(["subvolume", "create", &text(&own)]));
                    fs::write(own.join("file"), "x").unwrap();
                    ok(ubtrfs(["subvolume", "snapshot", &text(&own), &text(&snapshot)]));
                    // A walker may be in it at this moment.
                    let now = match fs::rename(&own, &moved) {
                        Ok(()) => &moved,
                        Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => &own,
                        Err(error) => panic!("{error}"),
                    };
                    assert_eq!(fs::read_to_string(now.join("file")).unwrap(), "x");
                    ok(ubtrfs(["subvolume", "delete", &text(now), &text(&snapshot)]));
                    changes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for args in [&["-xdev"][..], &[], &["-type", "f", "-exec", "cat", "{}", "+"]] {
            let (m, is_over, walks) = (&m, &is_over, &walks);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // Names may vanish during the walk.
                    let _ = Command::new("find").arg(m).args(args).output().unwrap();
                    walks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        thread::sleep(Duration::from_secs(10));
        is_over.store(true, Ordering::Relaxed);
    });
    let counts = (walks.into_inner(), changes.into_inner());
    assert!(counts.0 > 10 && counts.1 > 10, "{counts:?}");
    assert_eq!(scene.run(&["subvolume", "list", "m"]).lines().count(), 4);
    scene.umount();
}
