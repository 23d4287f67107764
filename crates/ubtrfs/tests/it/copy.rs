//! Tests copies from and to the host: a tree comes back equal, attribute by attribute; hostile images and hostile links on
//! the host change nothing outside of the target; failures of single files are reported, and the copy continues.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use rustix::fs::{CWD, FileType, Mode, SeekFrom, XattrFlags};
use ubtrfs::{Caller, CopyEvent, CopyOptions, CopyReport, FileTimes, Filesystem, IdRange, OwnerMap, SnapshotAccess};
use ubtrfs_testkit::{
    Compare, Image, KernelImage, KernelImageSpec, LoopMount, capability, compare_trees, crafted, judge, second_opinion,
    walk_path,
};

const SIZE: u64 = 512 << 20;

/// A directory with an empty image.
struct Scene {
    dir: tempfile::TempDir,
    fs: Filesystem,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fs = Filesystem::make_image(dir.path().join("disk.img"), SIZE).unwrap();
        Self { dir, fs }
    }

    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a file and the directories on the way to it.
    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Closes the image. Both checkers find nothing, and Linux mounts, reads and scrubs it.
    fn close(self) {
        self.fs.close().unwrap();
        let image = self.dir.path().join("disk.img");
        second_opinion(&image).unwrap();
        if capability::kernel_oracle() {
            judge(&image, "", &[]).unwrap();
        }
    }
}

/// Events of a copy, without the numbers of bytes and the files.
#[derive(Default)]
struct Seen(Mutex<Vec<CopyEvent>>);

impl Seen {
    fn watch(&self) -> impl Fn(CopyEvent) + Sync {
        move |event| match event {
            CopyEvent::Bytes(_) | CopyEvent::File(_) => {}
            event => self.0.lock().unwrap().push(event),
        }
    }

    fn failures(&self) -> Vec<String> {
        let seen = self.0.lock().unwrap();
        seen.iter()
            .map(|event| if let CopyEvent::Failed(text) = event { text.clone() } else { panic!("{event:?}") })
            .collect()
    }
}

/// Copies without a failure.
fn copy_from(fs: &Filesystem, host: &Path, path: &str) -> CopyReport {
    let seen = Seen::default();
    let report = fs.copy_from_host(host, path, &CopyOptions::default(), &seen.watch()).unwrap();
    assert_eq!((report.failed, seen.failures()), (0, Vec::new()));
    report
}

/// Copies without a failure.
fn copy_to(fs: &Filesystem, path: &str, host: &Path) -> CopyReport {
    let seen = Seen::default();
    let report = fs.copy_to_host(path, host, &CopyOptions::default(), &seen.watch()).unwrap();
    assert_eq!((report.failed, seen.failures()), (0, Vec::new()));
    report
}

/// The times of the last access and the bytes of data of everything below a directory.
fn times_and_data(top: &Path) -> BTreeMap<PathBuf, (i64, i64, u64)> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let data = if meta.is_file() { data_bytes(&path) } else { 0 };
        found.insert(path.strip_prefix(top).unwrap().to_owned(), (meta.atime(), meta.atime_nsec(), data));
    }
    found.remove(Path::new(""));
    found
}

/// Fails with the entries whose times of access or bytes of data differ.
fn compare_times_and_data(one: &Path, other: &Path) {
    let (left, right) = (times_and_data(one), times_and_data(other));
    assert!(left.keys().eq(right.keys()));
    let differs = |(path, about): &(&PathBuf, &(i64, i64, u64))| right.get(*path) != Some(*about);
    let shown = |(path, about): (&PathBuf, &(i64, i64, u64))| format!("{path:?}: {about:?} {:?}", right.get(path));
    let differences: Vec<String> = left.iter().filter(differs).map(shown).collect();
    assert!(differences.is_empty(), "{} differ: {:?}", differences.len(), &differences[..differences.len().min(9)]);
}

/// The bytes of a file that are not in holes.
fn data_bytes(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let (mut at, mut bytes) = (0, 0);
    while let Ok(start) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
        at = rustix::fs::seek(&file, SeekFrom::Hole(start)).unwrap();
        bytes += at - start;
    }
    bytes
}

/// Everything that a test might lose: each path below a directory with its type, content and mode.
fn state(top: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let content = match () {
            () if meta.is_dir() => {
                todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                Vec::new()
            }
            () if meta.is_symlink() => fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(),
            () => fs::read(&path).unwrap(),
        };
        found.insert(path, (meta.mode(), content));
    }
    found
}

#[test]
fn a_tree_of_linux_comes_back_equal() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = KernelImage::rich(KernelImageSpec::DEFAULT, 11).unwrap();
    let source = LoopMount::new(made.image.path(), "noatime").unwrap();
    let Scene { dir, fs } = Scene::new();
    let image = dir.path().join("disk.img");
    let report = copy_from(&fs, source.path(), "/");
    let nr_entries = report.files + report.directories + report.symlinks + report.hard_links + report.special_files;
    assert_eq!(nr_entries as usize, walk_path(source.path()).unwrap().len());
    assert!(report.hard_links > 100 && report.special_files > 3 && report.bytes > 8 << 20, "{report:?}");
    // Linux makes up the times of a placeholder for a nested subvolume, and the comparison takes them for 0.
    for snapshot in ["read-only", "writable"] {
        let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        fs.set_times(format!("/snapshots/{snapshot}/nested"), times).unwrap();
    }
    fs.close().unwrap();
    second_opinion(&image).unwrap();
    let copy = LoopMount::new(&image, "noatime").unwrap();
    compare_times_and_data(source.path(), copy.path());
    copy.close().unwrap();
    // The judge reads the files, and thereby changes their times of access.
    let judged = dir.path().join("judged.img");
    fs::copy(&image, &judged).unwrap();
    judge(&judged, "", &[(&walk_path(source.path()).unwrap(), Compare { root: true, ..Compare::COPY })]).unwrap();

    let empty = KernelImage::empty(KernelImageSpec::DEFAULT).unwrap();
    let target = LoopMount::new(empty.image.path(), "noatime").unwrap();
    let fs = Filesystem::open_image(&image).unwrap();
    assert_eq!(copy_to(&fs, "/", &target.join("copy")), report);
    fs.close().unwrap();
    compare_trees(source.path(), &target.join("copy"), Compare { root: true, ..Compare::COPY }).unwrap();
    compare_times_and_data(source.path(), &target.join("copy"));
    target.close().unwrap();
    source.close().unwrap();
}

#[test]
fn odd_names_kinds_and_holes_come_back_equal() {
    let scene = Scene::new();
    let source = scene.at("source");
    let below = |name: &[u8]| source.join(OsStr::from_bytes(name));
    let mut deep = source.join("deep");
    (0..60).for_each(|_| deep.push("d".repeat(60)));
    fs::create_dir_all(source.join("empty")).unwrap();
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("leaf"), "deep").unwrap();
    for name in [&b"a\nb"[..], b"\xff\xfe", b" ", b"-rf", b"*", &[b'n'; 255], "\u{202e}x".as_bytes()] {
        fs::write(below(name), name).unwrap();
    }
    let sparse = File::create(below(b"sparse")).unwrap();
    sparse.write_all_at(&[7; 70_000], 10 << 20).unwrap();
    sparse.set_len(1 << 30).unwrap();
    fs::write(below(b"large"), (0..3_000_000u32).map(|at| (at / 7) as u8).collect::<Vec<u8>>()).unwrap();
    fs::hard_link(below(b"large"), below(b"empty/again")).unwrap();
    for (number, target) in ["nowhere", "/etc/passwd", "..", "large"].iter().enumerate() {
        symlink(target, below(format!("link{number}").as_bytes())).unwrap();
    }
    fs::hard_link(below(b"link0"), below(b"link0-again")).unwrap();
    rustix::fs::mknodat(CWD, below(b"fifo"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    drop(std::os::unix::net::UnixListener::bind(below(b"socket")).unwrap());
    for mode in [0o400u32, 0o444, 0o6755, 0o1777] {
        let path = below(format!("mode{mode:o}").as_bytes());
        fs::write(&path, "m").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let has_xattrs = rustix::fs::setxattr(below(b"large"), "user.color", b"blue", XattrFlags::empty()).is_ok();
    fs::set_permissions(below(b"empty"), fs::Permissions::from_mode(0o500)).unwrap();
    File::open(below(b"empty")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();

    let report = copy_from(&scene.fs, &source, "/copy");
    assert_eq!((report.hard_links, report.symlinks, report.special_files), (2, 4, 2));
    assert!(report.bytes < 5 << 20, "holes are no data: {report:?}");
    assert_eq!(scene.fs.read("/copy/large").unwrap(), fs::read(below(b"large")).unwrap());
    assert_eq!(scene.fs.metadata("/copy/empty").unwrap().permissions(), 0o500);
    assert_eq!(scene.fs.xattr("/copy/large", "user.color").unwrap().is_some(), has_xattrs);
    let back = scene.at("back");
    assert_eq!(copy_to(&scene.fs, "/copy", &back), report);
    compare_trees(&source, &back, Compare { root: true, ..Compare::COPY }).unwrap();
    assert!(data_bytes(&back.join("sparse")) < 1 << 20);
    // The copy of a copy changes nothing.
    assert_eq!(copy_to(&scene.fs, "/copy/", &scene.at("back/")), report);
    assert_eq!(copy_from(&scene.fs, &back, "copy"), report);
    compare_trees(&source, &back, Compare { root: true, ..Compare::COPY }).unwrap();
    scene.close();
}

#[test]
fn single_files_and_links_to_the_named_paths_are_followed() {
    let scene = Scene::new();
    let file = scene.write("tree/file", "text");
    symlink("tree", scene.at("link")).unwrap();
    scene.fs.create_dir_all("/real/dir").unwrap();
    scene.fs.symlink("../real/dir", "/real/link").unwrap();
    scene.fs.symlink("/real/link", "/chain").unwrap();

    assert_eq!(copy_from(&scene.fs, &file, "/single").files, 1);
    assert_eq!(copy_from(&scene.fs, &scene.at("link"), "/chain").directories, 1);
    assert_eq!(scene.fs.read("/real/dir/file").unwrap(), b"text");
    let link = scene.fs.symlink_metadata("/chain").unwrap();
    assert!(link.is_symlink());
    fs::create_dir(scene.at("out")).unwrap();
    symlink("out", scene.at("to-out")).unwrap();
    assert_eq!(copy_to(&scene.fs, "/chain", &scene.at("to-out")).files, 1);
    assert_eq!(fs::read(scene.at("out/file")).unwrap(), b"text");
    assert_eq!(copy_to(&scene.fs, "real/link/file", &scene.at("alone")).files, 1);
    assert_eq!(fs::read(scene.at("alone")).unwrap(), b"text");
    scene.close();
}

#[test]
fn options_choose_what_is_kept() {
    let scene = Scene::new();
    let source = scene.at("source");
    let file = scene.write("source/a", "text");
    fs::hard_link(&file, scene.at("source/b")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    File::open(&file).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let (uid, gid) = (fs::metadata(&file).unwrap().uid(), fs::metadata(&file).unwrap().gid());
    let owner = |path: &str| {
        let meta = scene.fs.metadata(path).unwrap();
        (meta.uid(), meta.gid())
    };
    let copy = |to: &str, options: &CopyOptions| scene.fs.copy_from_host(&source, to, options, &|_| {}).unwrap();

    copy("/kept", &CopyOptions::default());
    assert_eq!((owner("/kept/a"), scene.fs.metadata("/kept/a").unwrap().nlink()), ((uid, gid), 2));
    assert_eq!(scene.fs.metadata("/kept/a").unwrap().modified(), Some(std::time::UNIX_EPOCH));

    let nothing = CopyOptions {
        keep_owner: false,
        keep_times: false,
        keep_xattrs: false,
        keep_hard_links: false,
        ..CopyOptions::default()
    };
    let alice = scene.fs.with_caller(Caller { uid: 1000, gid: 100, umask: 0o022 });
    let report = alice.copy_from_host(&source, "/nothing", &nothing, &|_| {}).unwrap();
    assert_eq!((report.files, report.hard_links), (2, 0));
    let meta = scene.fs.metadata("/nothing/a").unwrap();
    assert_eq!((meta.nlink(), meta.permissions(), owner("/nothing/a")), (1, 0o640, (1000, 100)));
    assert!(meta.modified().unwrap() > std::time::UNIX_EPOCH);

    copy("/owner", &CopyOptions { owner: Some((7, 8)), ..CopyOptions::default() });
    assert_eq!((owner("/owner/a"), owner("/owner")), ((7, 8), (7, 8)));

    let users = vec![IdRange { from: uid, to: 5000, count: 1 }];
    copy("/mapped", &CopyOptions { owners: OwnerMap { users, groups: Vec::new() }, ..CopyOptions::default() });
    assert_eq!(owner("/mapped/a"), (5000, gid));
    let groups = vec![IdRange { from: gid + 1, to: 0, count: 10 }];
    let options = CopyOptions { owners: OwnerMap { users: Vec::new(), groups }, ..CopyOptions::default() };
    let seen = Seen::default();
    let report = scene.fs.copy_from_host(&source, "/unmapped", &options, &seen.watch()).unwrap();
    // Both names of the file, and the attributes of the directory.
    assert_eq!((report.failed, report.files), (3, 0));
    let wanted = format!("its group {gid} is in no range of groups");
    assert!(seen.failures().iter().all(|text| text.ends_with(&wanted)), "{:?}", seen.failures());
    scene.close();
}

#[test]
fn progress_names_each_file_and_counts_bytes() {
    let scene = Scene::new();
    scene.write("source/a", "12345");
    scene.write("source/b/c", "678");
    let events = Mutex::new(Vec::new());
    let watch = |event| events.lock().unwrap().push(event);
    scene.fs.copy_from_host(scene.at("source"), "/to", &CopyOptions::default(), &watch).unwrap();
    let file = |name: &str| CopyEvent::File(scene.at(name).as_os_str().as_bytes().to_vec());
    let expected = [
        file("source"),
        file("source/a"),
        CopyEvent::Bytes(5),
        file("source/b"),
        file("source/b/c"),
        CopyEvent::Bytes(8),
    ];
    assert_eq!(events.into_inner().unwrap(), expected);
    scene.close();
}

#[test]
fn links_on_the_host_lead_no_copy_out_of_the_target() {
    let scene = Scene::new();
    scene.write("outside/file", "precious");
    scene.write("outside/dir/x", "precious");
    let target = scene.at("target");
    fs::create_dir(&target).unwrap();
    for (link, to) in
        [("a", "../outside"), ("f", "../outside/file"), ("new", "../outside/made"), ("d", "../outside/dir")]
    {
        symlink(to, target.join(link)).unwrap();
    }
    for path in ["/a", "/d", "/ok"] {
        scene.fs.create_dir(path).unwrap();
        scene.fs.write(format!("{path}/x"), "changed").unwrap();
    }
    scene.fs.write("/f", "changed").unwrap();
    scene.fs.symlink("elsewhere", "/new").unwrap();
    let before = state(&scene.at("outside"));
    let seen = Seen::default();
    let report = scene.fs.copy_to_host("/", &target, &CopyOptions::default(), &seen.watch()).unwrap();
    assert_eq!(state(&scene.at("outside")), before);
    assert_eq!((report.failed, report.files, report.symlinks), (2, 2, 1), "{:?}", seen.failures());
    assert!(seen.failures().iter().all(|text| text.contains("exists and is no directory")), "{:?}", seen.failures());
    assert_eq!(fs::read(target.join("ok/x")).unwrap(), b"changed");
    // A link in the place of a file is replaced.
    assert!(fs::symlink_metadata(target.join("f")).unwrap().is_file());
    assert_eq!(fs::read_link(target.join("new")).unwrap(), Path::new("elsewhere"));
    scene.close();
}

/// The first copy makes the link `a`, and the second one has a directory `a`.
#[test]
fn a_link_of_one_image_leads_no_other_copy_out_of_the_target() {
    let (scene, second) = (Scene::new(), Scene::new());
    scene.write("outside/file", "precious");
    let target = scene.at("target");
    scene.fs.symlink(scene.at("outside"), "/a").unwrap();
    scene.fs.symlink("../outside/file", "/f").unwrap();
    copy_to(&scene.fs, "/", &target);
    second.fs.create_dir("/a").unwrap();
    for path in ["/a/file", "/a/more", "/f"] {
        second.fs.write(path, "changed").unwrap();
    }
    let before = state(&scene.at("outside"));
    let report = second.fs.copy_to_host("/", &target, &CopyOptions::default(), &|_| {}).unwrap();
    assert_eq!((report.failed, state(&scene.at("outside"))), (1, before));
    assert_eq!(fs::read(target.join("f")).unwrap(), b"changed");

    // Inside of a filesystem, such links lead no further than its root.
    let inner = Scene::new();
    inner.fs.create_dir("/outside").unwrap();
    inner.fs.symlink("../../outside", "/a").unwrap();
    let out = inner.at("out");
    copy_to(&second.fs, "/", &out);
    let report = inner.fs.copy_from_host(&out, "/", &CopyOptions::default(), &|_| {}).unwrap();
    assert_eq!((report.failed, inner.fs.read_dir("/outside").unwrap().count()), (1, 0));
    scene.close();
    second.close();
    inner.close();
}

/// Another copy may have made the device, and its name may now be that of a file.
#[test]
fn special_files_on_the_host_are_replaced_and_not_written() {
    let scene = Scene::new();
    let target = scene.at("target");
    fs::create_dir_all(target.join("d")).unwrap();
    let mut names = vec!["/d/fifo", "/d/socket"];
    rustix::fs::mknodat(CWD, target.join("d/fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    drop(std::os::unix::net::UnixListener::bind(target.join("d/socket")).unwrap());
    if capability::root() {
        // Nothing can be written to this device.
        let full = rustix::fs::makedev(1, 7);
        rustix::fs::mknodat(CWD, target.join("d/full"), FileType::CharacterDevice, Mode::RWXU, full).unwrap();
        names.push("/d/full");
    }
    scene.fs.create_dir("/d").unwrap();
    for name in &names {
        scene.fs.write(name, "text").unwrap();
    }
    copy_to(&scene.fs, "/", &target);
    for name in &names {
        assert!(fs::symlink_metadata(target.join(&name[1..])).unwrap().is_file());
        assert_eq!(fs::read(target.join(&name[1..])).unwrap(), b"text");
    }
    scene.close();
}

#[test]
fn crafted_images_change_nothing_outside_of_the_target() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut images = crafted::hostile_trees().unwrap();
    // A link and a directory of one name in one directory.
    let scene = Scene::new();
    scene.fs.symlink("../..", "/a").unwrap();
    scene.fs.create_dir("/b").unwrap();
    scene.fs.write("/b/x", "changed").unwrap();
    scene.fs.close().unwrap();
    let twice = Image::copy_of(&scene.dir.path().join("disk.img")).unwrap();
    crafted::rename(&twice, b"b", b"a").unwrap();
    images.push(("a link and a directory of one name".to_owned(), twice));
    for (title, image) in images {
        let dir = tempfile::tempdir().unwrap();
        // The names in the images lead up at most five directories.
        let target = dir.path().join("1/2/3/4/5/6/target");
        fs::create_dir_all(&target).unwrap();
        fs::write(target.with_file_name("x"), "sentinel").unwrap();
        let before = state(dir.path());
        let Ok(fs) = Filesystem::open_image(image.path()) else { continue };
        for path in ["/", "/outer"] {
            // Some directories cannot be read at all.
            let _ = fs.copy_to_host(path, target.join("copy"), &CopyOptions::default(), &|_| {});
            let mut after = state(dir.path());
            after.retain(|path, _| !path.starts_with(target.join("copy")));
            assert_eq!(after, before, "{title}");
            let other = Filesystem::make_in_memory(128 << 20).unwrap();
            let copied = target.join("copy");
            if copied.exists() {
                other.copy_from_host(&copied, "/x", &CopyOptions::default(), &|_| {}).unwrap();
                fs::remove_dir_all(&copied).unwrap();
            }
        }
        drop(fs);
    }
}

#[test]
fn a_copy_from_the_host_reads_links_and_not_their_targets() {
    let scene = Scene::new();
    scene.write("outside/secret", "secret");
    scene.write("source/file", "text");
    symlink(scene.at("outside"), scene.at("source/out")).unwrap();
    symlink("../outside/secret", scene.at("source/secret")).unwrap();
    let report = copy_from(&scene.fs, &scene.at("source"), "/copy");
    assert_eq!((report.files, report.symlinks, report.bytes), (1, 2, 4));
    assert!(scene.fs.symlink_metadata("/copy/out").unwrap().is_symlink());
    scene.close();
}

#[test]
fn the_own_image_is_neither_source_nor_target() {
    let scene = Scene::new();
    scene.write("note", "text");
    let seen = Seen::default();
    let report = scene.fs.copy_from_host(scene.dir.path(), "/copy", &CopyOptions::default(), &seen.watch()).unwrap();
    assert_eq!((report.failed, report.files), (1, 1));
    assert!(seen.failures()[0].ends_with("it is the image that the files are copied to"), "{:?}", seen.failures());
    let error =
        scene.fs.copy_to_host("/copy/note", scene.at("disk.img"), &CopyOptions::default(), &|_| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
    scene.close();
}

#[test]
fn errors_name_the_reason() {
    let scene = Scene::new();
    scene.write("file", "text");
    fs::create_dir(scene.at("dir")).unwrap();
    scene.fs.create_dir("/dir").unwrap();
    scene.fs.write("/file", "text").unwrap();
    let options = CopyOptions::default();
    let from = |host: &str, path: &str| scene.fs.copy_from_host(scene.at(host), path, &options, &|_| {}).unwrap_err();
    let to = |path: &str, host: &str| scene.fs.copy_to_host(path, scene.at(host), &options, &|_| {}).unwrap_err();
    let missing = [from("missing", "/x"), from("file", "/missing/x"), to("/missing", "x"), to("/file", "missing/x")];
    for error in missing {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    for error in [from("dir", "/file"), from("file", "/dir"), to("/dir", "file"), to("/file", "dir")] {
        assert!(error.to_string().contains("remove it first"), "{error}");
    }
    assert_eq!(fs::read(scene.at("file")).unwrap(), b"text");
    scene.fs.create_subvolume("/fixed").unwrap();
    scene.fs.snapshot("/fixed", "/snapshot", SnapshotAccess::ReadOnly).unwrap();
    assert_eq!(from("file", "/snapshot/x").kind(), ErrorKind::ReadOnlyFilesystem);
    scene.close();
}

#[test]
fn a_full_filesystem_ends_the_copy() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for number in 0..40u8 {
        fs::write(source.join(format!("{number:02}")), vec![number; 8 << 20]).unwrap();
    }
    let image = dir.path().join("disk.img");
    let small = Filesystem::make_image(&image, 200 << 20).unwrap();
    let error = small.copy_from_host(&source, "/copy", &CopyOptions::default(), &|_| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert_eq!(small.read("/copy/00").unwrap(), vec![0; 8 << 20]);
    small.close().unwrap();
    second_opinion(&image).unwrap();
}

#[test]
fn names_of_one_file_in_two_subvolumes_become_two_files() {
    let scene = Scene::new();
    let file = scene.write("source/a/file", "text");
    fs::create_dir(scene.at("source/b")).unwrap();
    fs::hard_link(&file, scene.at("source/b/again")).unwrap();
    scene.fs.create_dir("/copy").unwrap();
    scene.fs.create_subvolume("/copy/b").unwrap();
    let seen = Seen::default();
    let report = scene.fs.copy_from_host(scene.at("source"), "/copy", &CopyOptions::default(), &seen.watch()).unwrap();
    assert_eq!((report.files, report.hard_links, report.failed), (2, 0, 0));
    let split = CopyEvent::SplitFile { first: b"/copy/a/file".to_vec(), other: b"/copy/b/again".to_vec() };
    assert_eq!(*seen.0.lock().unwrap(), [split]);
    scene.close();
}
