//! Tests of `ubtrfs subvolume` on images and on mounts, and of the server's interfaces that the command uses.
//!
//! Method: the built program makes, changes and deletes subvolumes. Then `btrfs check` is clean, and Linux mounts the
//! image, lists and shows subvolumes with output equal to the program's, and finds the right content in each subvolume.
//! Subvolumes made by Linux are also listed with output equal to Linux's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability, run as sh};

use crate::common::{ok, refused, ubtrfs};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// Runs the program with these words after `subvolume`.
fn subvolume<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> Output {
    let words: Vec<_> = words.into_iter().map(|word| word.as_ref().to_owned()).collect();
    ubtrfs([OsStr::new("subvolume").to_owned()].into_iter().chain(words))
}

/// Runs btrfs-progs with these words after `subvolume`.
fn theirs<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> String {
    let output =
        Command::new("btrfs").arg("subvolume").args(words).env("LC_ALL", "C").env("TZ", "UTC").output().unwrap();
    ok(&output)
}

/// A filesystem that the program works on.
trait Place {
    /// A path in the filesystem, as the program takes it.
    fn at(&self, path: &str) -> String;
    fn write(&self, path: &str, content: &[u8]);
    /// Unmounts if necessary, and returns the image.
    fn finish(self) -> Image;
}

struct OnImage(Image);

impl Place for OnImage {
    fn at(&self, path: &str) -> String {
        format!("{}:/{path}", self.0.path().display())
    }

    fn write(&self, path: &str, content: &[u8]) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), content).unwrap();
        ok(ubtrfs(["cp", &file.path().display().to_string(), &self.at(path)]));
    }

    fn finish(self) -> Image {
        self.0
    }
}

/// A mount, unmounted on drop, also if the test panics.
struct OnMount {
    image: Option<Image>,
    dir: TempDir,
}

impl OnMount {
    fn new(image: Image, options: &[&str]) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-subvolume-").unwrap();
        let (device, point) = (image.path().display().to_string(), dir.path().display().to_string());
        ok(ubtrfs(["mount"].iter().chain(options).chain([&&*device, &&*point])));
        Self { image: Some(image), dir }
    }

    fn join(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }
}

impl Place for OnMount {
    fn at(&self, path: &str) -> String {
        self.join(path).display().to_string()
    }

    fn write(&self, path: &str, content: &[u8]) {
        fs::write(self.join(path), content).unwrap();
    }

    fn finish(mut self) -> Image {
        let image = self.image.take().unwrap();
        ok(ubtrfs([OsStr::new("umount"), self.dir.path().as_os_str()]));
        image
    }
}

impl Drop for OnMount {
    fn drop(&mut self) {
        if self.image.is_some() {
            let _ = ubtrfs([OsStr::new("umount"), OsStr::new("-l"), self.dir.path().as_os_str()]);
        }
    }
}

fn image() -> Image {
    Image::kernel_made(512 << 20, &[]).unwrap()
}

const OPTIONS: &[&str] = &[
    "",
    "-u",
    "-q",
    "-uqR",
    "-s",
    "-r",
    "-a",
    "-o",
    "-ao",
    "-p",
    "-c",
    "-g",
    "-d",
    "-t",
    "-tpcguqRs",
    "-at",
    "-G8",
    "-G+8",
    "-G-8",
    "-C+7",
    "-tC-7",
    "--sort=-rootid",
    "--sort=path",
    "--sort=-gen,+path",
    "--sort=ogen,-path",
];

/// Lists the subvolumes of a filesystem once with each option.
fn lists(list: impl Fn(&[&str]) -> String) -> Vec<String> {
    OPTIONS.iter().map(|option| list(if option.is_empty() { &[] } else { std::slice::from_ref(option) })).collect()
}

/// The lists with paths seen from the top level, or from a subvolume.
fn our_lists(target: &str) -> Vec<String> {
    lists(|options| ok(subvolume(["list"].iter().chain(options).chain([&target]))))
}

fn their_lists(point: &Path) -> Vec<String> {
    let point = point.display().to_string();
    lists(|options| theirs(["list"].iter().chain(options).chain([&point.as_str()])))
}

/// The lines that both programs show: without the lines about send, receive and quotas, and with the snapshots sorted.
fn comparable(show: &str) -> Vec<String> {
    let mut lines: Vec<String> = show
        .lines()
        .filter(|line| !["Send ", "Receive ", "Quota "].iter().any(|word| line.trim_start().starts_with(word)))
        .map(|line| line.trim_end().to_owned())
        .collect();
    let snapshots = lines.iter().position(|line| line.contains("Snapshot(s)")).unwrap();
    lines[snapshots..].sort();
    lines
}

/// Makes, fills, snapshots and deletes subvolumes, some of them nested.
fn live<P: Place>(place: P) -> Image {
    let at = |path: &str| place.at(path);
    let big = Rng::new(9).bytes(3_000_000);
    assert_eq!(ok(subvolume(["create", &at("a")])), format!("Create subvolume '{}'\n", at("a")));
    ok(subvolume(["create", &at("gone"), &at("a/in"), &at("b")]));
    place.write("a/file", b"one");
    place.write("a/big", &big);
    place.write("a/in/deep", b"deep");
    place.write("gone/big", &big);
    let said = ok(subvolume(["snapshot", "-r", &at("a"), &at("s")]));
    assert_eq!(said, format!("Create a readonly snapshot of '{}' in '{}'\n", at("a"), at("s")));
    place.write("a/file", b"two");
    // In an existing directory, the snapshot gets the source's name.
    let said = ok(subvolume(["snapshot", &at("a"), &at("b")]));
    assert_eq!(said, format!("Create a snapshot of '{}' in '{}'\n", at("a"), at("b/a")));
    place.write("b/a/file", b"three");
    ok(subvolume(["snapshot", &at("s"), &at("again")]));
    place.write("again/file", b"four");
    ok(subvolume(["set-read-only", &at("b"), "true"]));
    ok(subvolume(["set-read-only", &at("again"), "true"]));
    ok(subvolume(["set-read-only", &at("again"), "false"]));

    assert_eq!(ok(subvolume(["get-default", &at("")])), "ID 5 (FS_TREE)\n");
    ok(subvolume(["set-default", &at("gone")]));
    assert!(ok(subvolume(["get-default", &at("")])).ends_with(" top level 5 path gone\n"));
    // Without `subvolid=5`, the command would open the image at its default subvolume `gone`, in which the name `gone`
    // does not exist. A mount stays at the subvolume that was the default when it was mounted.
    let (target, is_image) = (at("gone"), at("gone").contains(":/"));
    let words = if is_image { &["delete", "-o", "subvolid=5", &target][..] } else { &["delete", &target] };
    refused(&subvolume(words), &["cannot delete", "default"]);
    // As on Linux, 0 means the top level too.
    ok(subvolume(["set-default", "0", &at("")]));
    assert_eq!(ok(subvolume(["get-default", &at("")])), "ID 5 (FS_TREE)\n");
    ok(subvolume(["set-default", "5", &at("")]));
    refused(&subvolume(["delete", "-c", &at("a")]), &["cannot delete", "other subvolumes"]);

    let said = ok(subvolume(["delete", &at("gone"), &at("a/in")]));
    assert_eq!(said, format!("Delete subvolume '{}'\nDelete subvolume '{}'\n", at("gone"), at("a/in")));
    refused(&subvolume(["show", &at("gone")]), &["gone"]);

    let list = ok(subvolume(["list", &at("")]));
    let paths: Vec<&str> = list.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert_eq!(paths, ["a", "b", "s", "b/a", "again"], "by id: {list}");
    let json = ok(subvolume(["list", "--json", "-s", &at("")]));
    assert_eq!(json.matches("\"parent_uuid\"").count(), 3, "{json}");
    assert_eq!(json.matches("\"read_only\": true").count(), 1, "{json}");
    assert!(ok(subvolume(["show", &at("s")])).contains("readonly"));
    assert!(ok(subvolume(["show", "--json", &at("a")])).contains("\"b/a\""));
    place.finish()
}

/// Checks that Linux finds the result of [`live`], and lists it with equal output.
fn judge_life(image: &Image) {
    btrfs_check(image.path()).unwrap();
    let ours = our_lists(&image.path().display().to_string());
    let inside = ["b", "again"].map(|path| (path, our_lists(&format!("{}:/{path}", image.path().display()))));
    let show = |path: &str| comparable(&ok(subvolume(["show", &format!("{}:/{path}", image.path().display())])));
    let shown = ["", "a", "b", "s", "b/a", "again"].map(|path| (path, show(path)));
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    assert_eq!(ours, their_lists(linux.path()));
    for (inside, ours) in inside {
        assert_eq!(ours, their_lists(&linux.join(inside)), "{inside}");
    }
    for (path, ours) in shown {
        assert_eq!(ours, comparable(&theirs([OsStr::new("show"), linux.join(path).as_os_str()])), "{path}");
    }
    assert_eq!(theirs([OsStr::new("get-default"), linux.path().as_os_str()]), "ID 5 (FS_TREE)\n");
    for (path, content) in [("a", "two"), ("s", "one"), ("b/a", "three"), ("again", "four")] {
        assert_eq!(fs::read(linux.join(path).join("file")).unwrap(), content.as_bytes(), "{path}");
        assert_eq!(fs::read(linux.join(path).join("big")).unwrap(), Rng::new(9).bytes(3_000_000), "{path}");
    }
    assert!(!linux.join("a/in").exists() && !linux.join("gone").exists());
    // Snapshots do not include nested subvolumes.
    assert_eq!(fs::read_dir(linux.join("s/in")).unwrap().count(), 0);
    linux.close().unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    assert_eq!(
        fs::write(linux.join("b/new"), b"").unwrap_err().raw_os_error(),
        Some(Errno::ROFS.raw_os_error()),
        "b is read-only"
    );
    fs::write(linux.join("again/new"), b"").unwrap();
    linux.scrub().unwrap();
    linux.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn subvolumes_of_an_image() {
    if !capability::kernel_oracle() {
        return;
    }
    judge_life(&live(OnImage(image())));
}

#[test]
fn subvolumes_of_a_mount() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    judge_life(&live(OnMount::new(image(), &[])));
}

#[test]
fn subvolumes_of_a_confined_mount() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    judge_life(&live(OnMount::new(image(), &["--sandbox"])));
}

#[test]
fn deleting_from_an_image_gives_the_space_back() {
    if !capability::kernel_oracle() {
        return;
    }
    let place = OnImage(image());
    ok(subvolume(["create", &place.at("a")]));
    place.write("a/big", &Rng::new(3).bytes(50_000_000));
    ok(subvolume(["snapshot", &place.at("a"), &place.at("b")]));
    ok(subvolume(["delete", &place.at("a"), &place.at("b")]));
    btrfs_check(place.0.path()).unwrap();
    let linux = LoopMount::new(place.0.path(), "ro").unwrap();
    let point = linux.path().display().to_string();
    assert_eq!(theirs(["list", "-d", &point]), "", "nothing is left for Linux to delete");
    let used = sh("btrfs", ["filesystem", "df", "-b", &point]).unwrap();
    let data = used.lines().find(|line| line.starts_with("Data")).unwrap();
    let used: u64 = data.rsplit_once("used=").unwrap().1.trim().parse().unwrap();
    assert!(used < 1 << 20, "{data}");
    linux.close().unwrap();
}

#[test]
fn subvolumes_made_by_linux_are_listed_as_linux_lists_them() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let linux = LoopMount::new(image.path(), "").unwrap();
    fs::create_dir(linux.join("dir")).unwrap();
    for words in [
        &["create", "a"][..],
        &["create", "dir/b b"],
        &["create", "a/in"],
        &["snapshot", "-r", "a", "s"],
        &["snapshot", "s", "dir/from s"],
    ] {
        let output = Command::new("btrfs").arg("subvolume").args(words).current_dir(linux.path()).output().unwrap();
        ok(&output);
    }
    linux.close().unwrap();

    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let expected = ["", "dir", "a/in", "a"].map(|path| (path, their_lists(&linux.join(path))));
    let paths = ["", "a", "dir/b b", "a/in", "s", "dir/from s"];
    let shown = paths.map(|path| comparable(&theirs([OsStr::new("show"), linux.join(path).as_os_str()])));
    linux.close().unwrap();
    let place = OnImage(image);
    for (path, expected) in &expected {
        assert_eq!(our_lists(&place.at(path)), *expected, "{path}");
    }
    assert_eq!(our_lists(&place.0.path().display().to_string()), expected[0].1, "the image alone");
    assert_eq!(paths.map(|path| comparable(&ok(subvolume(["show", &place.at(path)])))), shown);
    let place = OnMount::new(place.finish(), &["-r"]);
    for (path, expected) in &expected {
        assert_eq!(our_lists(&place.at(path)), *expected, "{path}");
    }
    assert_eq!(paths.map(|path| comparable(&ok(subvolume(["show", &place.at(path)])))), shown);
    refused(&subvolume(["create", &place.at("new")]), &["read-only"]);
    refused(&subvolume(["set-read-only", &place.at("s"), "false"]), &["read-only"]);
    refused(&subvolume(["delete", &place.at("s")]), &["read-only"]);
    place.finish();
}

#[test]
fn hundreds_of_subvolumes_are_listed_in_pages() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let name = |number: usize| format!("{number:03}{}", "n".repeat(250));
    for number in 0..300 {
        theirs([OsStr::new("create"), linux.join(name(number)).as_os_str()]);
    }
    linux.close().unwrap();
    let place = OnMount::new(image, &["-r"]);
    let list = ok(subvolume(["list", &place.at("")]));
    let listed: Vec<&str> = list.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert_eq!(listed, (0..300).map(name).collect::<Vec<_>>());
    place.finish();
}

#[test]
fn impossible_subvolume_commands_print_one_line() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    fn refusals<P: Place>(place: P) {
        let at = |path: &str| place.at(path);
        place.write("file", b"x");
        ok(subvolume(["create", &at("a")]));
        ok(subvolume(["create", &at("a/in")]));
        refused(&subvolume(["create", &at("a")]), &["exists", "another name"]);
        refused(&subvolume(["create", &at("file")]), &["exists"]);
        refused(&subvolume(["create", &at("nowhere/x")]), &["nowhere"]);
        refused(&subvolume(["create", &at(&"n".repeat(256))]), &["too long"]);
        refused(&subvolume(["create", &at("")]), &[]);
        refused(&subvolume(["delete", &at("dir")]), &["not a subvolume"]);
        refused(&subvolume(["delete", &at("file")]), &["not a subvolume"]);
        refused(&subvolume(["delete", &at("nowhere")]), &["nowhere"]);
        refused(&subvolume(["delete", &at("a")]), &["other subvolumes"]);
        refused(&subvolume(["delete", &at("")]), &[]);
        refused(&subvolume(["snapshot", &at("dir"), &at("s")]), &["not a subvolume"]);
        refused(&subvolume(["snapshot", &at("a"), &at("file")]), &["exists"]);
        refused(&subvolume(["snapshot", &at("a"), &at("nowhere/s")]), &["nowhere"]);
        refused(&subvolume(["snapshot", &at("a"), "/tmp"]), &["/tmp"]);
        refused(&subvolume(["show", &at("dir")]), &["not a subvolume"]);
        refused(&subvolume(["set-default", &at("dir")]), &["not a subvolume"]);
        refused(&subvolume(["set-default", "9999", &at("")]), &["no such subvolume"]);
        refused(&subvolume(["set-default", "many", &at("")]), &["'many'"]);
        refused(&subvolume(["set-read-only", &at("dir"), "true"]), &["not a subvolume"]);
        refused(&subvolume(["set-read-only", &at("a"), "perhaps"]), &["perhaps"]);
        ok(subvolume(["set-read-only", &at("a"), "true"]));
        refused(&subvolume(["create", &at("a/more")]), &["read-only"]);
        refused(&subvolume(["delete", &at("a/in")]), &["read-only"]);
        btrfs_check(place.finish().path()).unwrap();
    }
    let place = OnImage(image());
    ok(ubtrfs(["mkdir", &place.at("dir")]));
    refusals(place);
    let mount = OnMount::new(image(), &[]);
    fs::create_dir(mount.join("dir")).unwrap();
    // A command on the image is refused while the mount has the image open.
    let locked = format!("{}:/x", mount.image.as_ref().unwrap().path().display());
    refused(&subvolume(["create", &locked]), &[]);
    refusals(mount);

    let elsewhere = TempDir::new().unwrap();
    let path = elsewhere.path().display().to_string();
    for words in [&["list", &path][..], &["show", &path], &["get-default", &path], &["create", &format!("{path}/x")]] {
        refused(&subvolume(words), &["in a mount of ubtrfs"]);
    }
}

#[test]
fn names_show_at_once_as_they_are() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let place = OnMount::new(image(), &[]);
    let listed = || fs::read_dir(place.dir.path()).unwrap().count();
    for round in 0..10 {
        let name = place.join("a");
        // Make the kernel cache the directory's content, and the fact that the name does not exist.
        assert!(!name.exists());
        assert_eq!(listed(), 0);
        ok(subvolume(["create", &place.at("a")]));
        fs::write(name.join("file"), [round]).unwrap();
        ok(subvolume(["snapshot", &place.at("a"), &place.at("b")]));
        assert_eq!(fs::read(place.join("b/file")).unwrap(), [round]);
        assert_eq!(listed(), 2);
        ok(subvolume(["delete", &place.at("a"), &place.at("b")]));
        assert!(!name.exists() && !place.join("b/file").exists());
    }
    btrfs_check(place.finish().path()).unwrap();
}

#[test]
fn a_snapshot_contains_data_that_only_the_kernel_had() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let place = OnMount::new(image(), &["-o", "writeback_cache"]);
    ok(subvolume(["create", &place.at("a")]));
    let data = Rng::new(4).bytes(300_000);
    fs::write(place.join("a/file"), &data).unwrap();
    ok(subvolume(["snapshot", "-r", &place.at("a"), &place.at("s")]));
    assert_eq!(fs::read(place.join("s/file")).unwrap(), data);
    assert_eq!(fs::write(place.join("s/file"), b"").unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    btrfs_check(place.finish().path()).unwrap();
}

/// Runs a shell script as nobody.
fn as_nobody(dir: &Path, script: &str) -> Output {
    Command::new("timeout")
        .args([
            "60",
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "sh",
            "-c",
            script,
        ])
        .current_dir(dir)
        .env("LC_ALL", "C")
        .output()
        .unwrap()
}

#[test]
fn users_have_their_own_subvolumes_alone() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("setpriv") {
        return;
    }
    let place = OnMount::new(image(), &["-o", "user_subvol_rm_allowed"]);
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(place.dir.path(), 0o755);
    // A directory in which users may run the program.
    let bin = TempDir::new().unwrap();
    open(bin.path(), 0o755);
    fs::copy(UBTRFS, bin.path().join("ubtrfs")).unwrap();
    let user = |words: &str| {
        as_nobody(place.dir.path(), &format!("umask 027; exec {}/ubtrfs subvolume {words}", bin.path().display()))
    };
    fs::create_dir(place.join("open")).unwrap();
    open(&place.join("open"), 0o777);
    ok(subvolume(["create", &place.at("roots"), &place.at("open/roots")]));
    open(&place.join("roots"), 0o755);

    refused(&user("create x"), &["permission denied"]);
    ok(user("create open/mine"));
    let made = fs::metadata(place.join("open/mine")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (65534, 65534, 0o750), "owner and umask");
    ok(user("snapshot open/mine open/snap"));
    refused(&user("snapshot roots open/x"), &["another user"]);
    refused(&user("snapshot open/mine x"), &["permission denied"]);
    refused(&user("delete open/roots"), &["permission denied"]);
    refused(&user("delete roots"), &["permission denied"]);
    refused(&user("set-read-only roots true"), &[]);
    refused(&user("set-default open/mine"), &["another user"]);
    refused(&user("list ."), &["another user"]);
    assert!(ok(user("show open/mine")).contains("open/mine"));
    ok(user("set-read-only open/mine true"));
    ok(user("set-read-only open/mine false"));
    ok(user("delete open/snap"));
    open(&place.join("open"), 0o1777);
    ok(user("delete open/mine"));

    ok(subvolume(["create", &place.at("open/given")]));
    chown(place.join("open/given"), Some(65534), Some(65534)).unwrap();
    open(&place.join("open"), 0o755);
    refused(&user("delete open/given"), &["permission denied"]);
    let image = place.finish();
    btrfs_check(image.path()).unwrap();

    let place = OnMount::new(image, &[]);
    let user = |words: &str| as_nobody(place.dir.path(), &format!("exec {}/{words}", bin.path().display()));
    open(&place.join("open"), 0o777);
    refused(&user("ubtrfs subvolume delete open/given"), &["user_subvol_rm_allowed", "rmdir"]);
    ok(as_nobody(place.dir.path(), "rmdir open/given"));
    btrfs_check(place.finish().path()).unwrap();
}

/// Names that the kernel has cached must not keep a deleted subvolume alive.
#[test]
fn the_space_of_a_deleted_subvolume_comes_back_when_its_files_are_closed() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let place = OnMount::new(image(), &[]);
    ok(subvolume(["create", &place.at("s")]));
    fs::create_dir_all(place.join("s/d/e")).unwrap();
    for (path, bytes) in [("s/big", 100 << 20), ("s/d/e/file", 100), ("s/d/other", 100)] {
        fs::write(place.join(path), vec![7; bytes]).unwrap();
    }
    ok(ubtrfs(["sync", &place.at("")]));
    let free = || rustix::fs::statvfs(place.dir.path()).unwrap().f_bfree;
    let open =
        [place.join("s/big"), place.join("s/d/e/file"), place.join("s/d")].map(|path| fs::File::open(path).unwrap());
    let before = free();
    ok(subvolume(["delete", &place.at("s")]));
    std::thread::sleep(std::time::Duration::from_millis(500));
    let inner = rustix::fs::openat(&open[2], "e/file", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    ok(ubtrfs(["sync", &place.at("")]));
    assert!(free() < before + (50 << 20) / 4096, "a file is open");
    drop((open, inner));
    let has_come_back = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        ok(ubtrfs(["sync", &place.at("")]));
        free() > before + (90 << 20) / 4096
    });
    assert!(has_come_back);
    btrfs_check(place.finish().path()).unwrap();
}

#[test]
fn the_servers_only_attribute_names_its_socket_and_is_not_listed() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("getfattr") {
        return;
    }
    let place = OnMount::new(image(), &[]);
    ok(subvolume(["create", &place.at("a")]));
    for path in [place.at(""), place.at("a")] {
        assert_eq!(sh("getfattr", ["-d", "-m", "-", "--absolute-names", &path]).unwrap(), "");
        let value = |name: &str| sh("getfattr", ["-n", name, "--only-values", "--absolute-names", &path]);
        assert!(value("ubtrfs.control").unwrap().starts_with("ubtrfs-"));
        for gone in ["ubtrfs.subvolume", "ubtrfs.sync", "ubtrfs.stats", "ubtrfs.why"] {
            assert!(value(gone).is_err(), "{gone}");
        }
    }
    let set = |name: &str| Command::new("setfattr").args(["-n", name, "-v", "x", &place.at("")]).output().unwrap();
    for name in ["ubtrfs.control", "ubtrfs.subvolume.create", "ubtrfs.subvolume.default"] {
        assert!(!set(name).status.success(), "{name}");
    }
    btrfs_check(place.finish().path()).unwrap();
}

/// The ioctls of programs that know btrfs, in Python.
const IOCTLS: &str = r#"
import errno, fcntl, os, struct, sys
os.chdir(sys.argv[1])
def call(path, number, argument):
    fd = os.open(path, os.O_RDONLY)
    try:
        data = bytearray(argument)
        fcntl.ioctl(fd, number, data)
        return bytes(data)
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        os.close(fd)
def name(text):
    return struct.pack("q", -1) + text.encode().ljust(4088, b"\0")
word = lambda number: struct.pack("Q", number)
CREATE, DESTROY, SETFLAGS, DEFAULT, INFO, GETFLAGS = 0x5000940e, 0x5000940f, 0x4008941a, 0x40089413, 0x81f8943c, 0x80089419
def equal(found, expected):
    assert found == expected, (found, expected)
os.mkdir("dir")
assert not os.path.exists("dir/new")
assert len(call("dir", CREATE, name("new"))) == 4096
assert os.path.isdir("dir/new") and os.listdir("dir") == ["new"]
equal(call("dir", CREATE, name("new")), "EEXIST")
equal(call("dir", CREATE, name("a/b")), "EINVAL")
equal(call("dir", CREATE, name("n" * 256)), "ENAMETOOLONG")
info = call("dir/new", INFO, bytes(504))
treeid, = struct.unpack_from("Q", info, 0)
equal(info[8:12], b"new\0")
parent, dirid, generation, flags = struct.unpack_from("4Q", info, 264)
equal((parent, dirid, flags), (5, os.stat("dir").st_ino, 0))
assert treeid >= 256 and generation > 0 and any(info[296:312])
otransid, = struct.unpack_from("Q", info, 352)
otime, = struct.unpack_from("Q", info, 392)
assert 0 < otransid <= generation and otime > 1700000000
equal(struct.unpack_from("Q", call(".", INFO, bytes(504)), 0), (5,))
equal(call("dir/new", SETFLAGS, word(4)), "ENOTSUP")
equal(call("dir", SETFLAGS, word(2)), "EINVAL")
assert len(call("dir/new", SETFLAGS, word(2))) == 8
equal(call("dir/new", GETFLAGS, word(0)), word(2))
try:
    open("dir/new/file", "w")
    assert False
except OSError as error:
    equal(error.errno, errno.EROFS)
call("dir/new", SETFLAGS, word(0))
open("dir/new/file", "w").close()
assert len(call(".", DEFAULT, word(treeid))) == 8
equal(call("dir", DESTROY, name("new")), "EPERM")
assert len(call(".", DEFAULT, word(0))) == 8
equal(call(".", DESTROY, name("dir")), "EINVAL")
equal(call(".", DESTROY, name("missing")), "ENOENT")
assert len(call("dir", DESTROY, name("new"))) == 4096
assert not os.path.exists("dir/new") and os.listdir("dir") == []
os.mkdir("closed", 0o755)
call("closed", CREATE, name("roots"))
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
equal(call("closed", CREATE, name("x")), "EACCES")
equal(call("closed", DESTROY, name("roots")), "EPERM")
equal(call("closed/roots", SETFLAGS, word(2)), "EPERM")
equal(call(".", DEFAULT, word(0)), "EPERM")
"#;

#[test]
fn ioctls_of_btrfs_reach_the_server() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("python3") {
        return;
    }
    let place = OnMount::new(image(), &[]);
    fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    sh("python3", ["-c", IOCTLS, &place.at("")]).unwrap();
    btrfs_check(place.finish().path()).unwrap();
}

#[test]
fn a_subvolume_is_deleted_by_its_id_on_images_and_mounts() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-subvolume-").unwrap();
    let (path, mount) = (image.path().to_str().unwrap().to_owned(), dir.path().to_str().unwrap().to_owned());
    ok(ubtrfs(["mkdir", &format!("{path}:/d")]));
    for place in [&path, &mount] {
        if *place == mount {
            ok(ubtrfs(["mount", &path, &mount]));
        }
        let at = |name: &str| if *place == mount { format!("{mount}/{name}") } else { format!("{path}:/{name}") };
        ok(ubtrfs(["subvolume", "create", &at("d/s")]));
        let list = ok(ubtrfs(["subvolume", "list", place]));
        let id = list.split_whitespace().nth(1).unwrap().to_owned();
        refused(&ubtrfs(["subvolume", "delete", "-i", "9999", place]), &["cannot delete", "9999"]);
        refused(&ubtrfs(["subvolume", "delete", "-i", "5", place]), &["cannot delete"]);
        refused(&ubtrfs(["subvolume", "delete", "-i", &id, place, place]), &["one path"]);
        let deleted = ok(ubtrfs(["subvolume", "delete", "--subvolid", &id, place]));
        assert!(deleted.starts_with(&format!("Delete subvolume {id} of ")), "{deleted}");
        assert_eq!(ok(ubtrfs(["subvolume", "list", place])), "");
    }
    assert!(!dir.path().join("d/s").exists());
    ok(ubtrfs(["umount", &mount]));
    btrfs_check(image.path()).unwrap();
}

#[test]
fn parents_are_made_and_nested_subvolumes_deleted_on_request() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    fn all<P: Place>(place: P) {
        let at = |path: &str| place.at(path);
        let paths = || {
            let list = ok(subvolume(["list", &at("")]));
            let mut paths: Vec<String> = list.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
            paths.sort();
            paths
        };
        ok(subvolume(["create", "-p", &at("a")]));
        refused(&subvolume(["create", "-p", &at("a")]), &["exists"]);
        refused(&subvolume(["create", &at("d/e/b")]), &["d/e"]);
        let made = ok(subvolume(["create", "--parents", &at("d/e/b"), &at("a/in/c"), &at("a/in/c/x/y/z")]));
        assert_eq!(made.lines().count(), 3, "{made}");
        place.write("file", b"x");
        refused(&subvolume(["create", "-p", &at("file/x")]), &["file"]);
        refused(&subvolume(["create", "-p", &at(&format!("{}/x", "n".repeat(256)))]), &["too long"]);
        ok(subvolume(["snapshot", "-r", &at("a"), &at("snap")]));
        ok(subvolume(["create", &at("other")]));
        assert_eq!(paths(), ["a", "a/in/c", "a/in/c/x/y/z", "d/e/b", "other", "snap"]);

        refused(&subvolume(["delete", &at("a")]), &["other subvolumes", "-R"]);
        refused(&subvolume(["delete", "-R", "-i", "256", &at("")]), &["--subvolid"]);
        let deleted = ok(subvolume(["delete", "-R", "-c", &at("a"), &at("d/e/b")]));
        let lines: Vec<&str> = deleted.lines().collect();
        let wanted = ["a/in/c/x/y/z", "a/in/c", "a", "d/e/b"].map(|path| format!("Delete subvolume '{}'", at(path)));
        assert_eq!(lines, wanted);
        assert_eq!(paths(), ["other", "snap"]);
        ok(subvolume(["create", &at("other/ro")]));
        ok(subvolume(["create", &at("other/ro/in")]));
        ok(subvolume(["set-read-only", &at("other/ro"), "true"]));
        refused(&subvolume(["delete", "-R", &at("other")]), &["other/ro/in", "read-only"]);
        assert_eq!(paths(), ["other", "other/ro", "other/ro/in", "snap"]);
        btrfs_check(place.finish().path()).unwrap();
    }
    all(OnImage(image()));
    let mount = OnMount::new(image(), &[]);
    // No name of a subvolume leads out of the mount.
    let elsewhere = TempDir::new().unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), mount.join("out")).unwrap();
    refused(&subvolume(["create", "-p", &mount.at("out/x/y")]), &["in a mount of ubtrfs"]);
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    fs::remove_file(mount.join("out")).unwrap();
    all(mount);
}
