//! Tests subvolumes and snapshots that Linux made: selecting the subvolume to mount, and entering and changing
//! subvolumes. Also tests `statfs`, as `df` shows it.
//!
//! Method: Linux makes the image on a loop mount. Both before and after the engine changes the image, the directory
//! tree that the engine shows is compared with the one that Linux shows.

use std::path::Path;

use anyhow::Result;
use rustix::io::Errno;
use ubtrfs_format::RootId;
use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{Caller, Fs, MountOptions, NewInode, RenameFlags, SetAttr};
use ubtrfs_testkit::{
    Compare, FsTarget, Image, LoopMount, btrfs_check, capability, compare_entries, errno, run, walk_path,
};

const ROOT: Caller = Caller::ROOT;

fn subvolume(mount: &LoopMount, args: &[&str], path: &str) {
    let path = mount.join(path).display().to_string();
    let mut all = vec!["subvolume"];
    all.extend(args);
    all.push(&path);
    run("btrfs", all).unwrap();
}

/// The top level has subvolumes `home` and `home/nested`, and a read-only snapshot `ro` and a writable snapshot `rw` of
/// `home`.
fn with_subvolumes() -> Image {
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    subvolume(&mount, &["create"], "home");
    std::fs::create_dir(mount.join("home/docs")).unwrap();
    for i in 0..500 {
        std::fs::write(mount.join(format!("home/docs/{i}")), format!("text {i}").repeat(i)).unwrap();
    }
    subvolume(&mount, &["create"], "home/nested");
    std::fs::write(mount.join("home/nested/inner"), b"inner").unwrap();
    let home = mount.join("home").display().to_string();
    subvolume(&mount, &["snapshot", "-r", &home], "ro");
    subvolume(&mount, &["snapshot", &home], "rw");
    std::fs::write(mount.join("top"), b"top").unwrap();
    mount.close().unwrap();
    image
}

fn id_of(fs: &Fs, path: &str) -> RootId {
    fs.subvolumes().unwrap().into_iter().find(|subvolume| subvolume.path == path.as_bytes()).unwrap().id
}

fn compare_with_linux(image: &Image, options: &str) -> Result<()> {
    let ours = FsTarget::open(image.path(), &["ro", options].join(","))?;
    let walked = ours.walk()?;
    ours.close()?;
    let mount = LoopMount::new(image.path(), options)?;
    compare_entries(&walked, &walk_path(mount.path())?, Compare::ALL)?;
    let complaints = mount.kernel_complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    mount.close()
}

#[test]
fn subvolumes_are_listed_and_shown_as_asked_for() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = with_subvolumes();
    for options in ["", "subvol=home", "subvol=/home/nested", "subvol=ro", "subvolid=5"] {
        compare_with_linux(&image, options).unwrap();
    }
    let target = FsTarget::open(image.path(), "ro").unwrap();
    let fs = target.fs();
    let list = fs.subvolumes().unwrap();
    let paths: Vec<_> = list.iter().map(|subvolume| String::from_utf8_lossy(&subvolume.path).into_owned()).collect();
    assert_eq!(paths, ["", "home", "home/nested", "ro", "rw"]);
    assert!(list[3].flags.contains(RootFlags::RDONLY) && list[3].parent_uuid == list[1].uuid);
    let nested = fs.lookup_path(b"home/nested", true).unwrap();
    assert_eq!((nested.id.root, nested.id.ino.0), (list[2].id, 256));
    assert_eq!(fs.parent(nested.id).unwrap(), fs.lookup_path(b"home", true).unwrap().id);
    assert_eq!(fs.path_of(fs.lookup_path(b"rw/docs", true).unwrap().id).unwrap(), b"rw/docs");
    let stub = fs.lookup_path(b"rw/nested", true).unwrap();
    assert_eq!(stub.id.stub_of(), Some(list[2].id), "a snapshot holds the name of a nested subvolume only");
    target.close().unwrap();

    let open = |options: &str| FsTarget::open(image.path(), options).map(drop);
    assert!(open("ro,subvol=none").unwrap_err().to_string().contains("none"));
    assert!(open("ro,subvol=home/docs").is_err());
    assert!(open("ro,subvolid=4711").unwrap_err().to_string().contains("4711"));
    assert!(open(&format!("ro,subvol=home,subvolid={}", list[3].id)).is_err());
    open(&format!("ro,subvol=home,subvolid={}", list[1].id)).unwrap();

    let mount = LoopMount::new(image.path(), "").unwrap();
    subvolume(&mount, &["set-default"], "home");
    mount.close().unwrap();
    let target = FsTarget::open(image.path(), "ro").unwrap();
    assert_eq!(target.fs().root().root, id_of(target.fs(), "home"));
    assert!(target.fs().lookup(target.fs().root(), b"docs").is_ok());
    // `..` of the selected subvolume leads out of it only if the top level is shown, too.
    let (fs, top) = (target.fs(), ubtrfs_fs::InodeId::root_of(RootId::FS_TREE));
    let above = || fs.lookup(fs.root(), b"..").unwrap().id;
    assert_eq!((above(), fs.shows_top_level()), (fs.root(), false));
    fs.show_top_level();
    assert_eq!((above(), fs.shows_top_level()), (top, true));
    assert_eq!(fs.lookup(top, b"..").unwrap().id, top);
    let selected = |options: &str| fs.selected_root(&ubtrfs_fs::MountOptions::parse(options).unwrap());
    assert_eq!(selected("").unwrap(), fs.root());
    assert_eq!(selected("subvol=ro").unwrap().root, list[3].id);
    assert!(selected("subvol=home/docs").is_err());
    target.close().unwrap();
}

#[test]
fn snapshots_are_changed_apart() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = with_subvolumes();
    let target = FsTarget::open(image.path(), "").unwrap();
    let fs = target.fs();
    let root = fs.root();
    let at = |path: &str| fs.lookup_path(path.as_bytes(), true).unwrap().id;

    let ro = at("ro/docs");
    assert_eq!(errno(fs.create(ro, b"x", NewInode::file(0), &ROOT)), Errno::ROFS);
    assert_eq!(errno(fs.unlink(ro, b"1")), Errno::ROFS);
    assert_eq!(
        errno(fs.setattr(at("ro/docs/1"), &SetAttr { mode: Some(0), ..SetAttr::default() }, &ROOT)),
        Errno::ROFS
    );
    assert_eq!(errno(fs.rename(ro, b"1", ro, b"2", RenameFlags::empty())), Errno::ROFS);

    let (home, rw) = (at("home/docs"), at("rw/docs"));
    assert_eq!(errno(fs.rename(home, b"1", rw, b"one", RenameFlags::empty())), Errno::XDEV);
    assert_eq!(errno(fs.link(at("home/docs/1"), rw, b"one")), Errno::XDEV);
    assert_eq!(errno(fs.rmdir(root, b"home")), Errno::NOTEMPTY);
    assert_eq!(errno(fs.unlink(root, b"home")), Errno::ISDIR);
    fs.rename(root, b"home", root, b"house", RenameFlags::empty()).unwrap();
    fs.rename(root, b"house", root, b"home", RenameFlags::NOREPLACE).unwrap();
    assert_eq!(errno(fs.create(at("rw/nested"), b"x", NewInode::file(0), &ROOT)), Errno::ACCESS);
    fs.rmdir(at("rw"), b"nested").unwrap();

    for i in 0..500 {
        let name = i.to_string();
        match i % 5 {
            0 => fs.unlink(rw, name.as_bytes()).unwrap(),
            1 => fs.unlink(home, name.as_bytes()).unwrap(),
            2 => fs.rename(rw, name.as_bytes(), at("rw"), name.as_bytes(), RenameFlags::empty()).unwrap(),
            3 => drop(fs.create(home, format!("new {i}").as_bytes(), NewInode::dir(0o700), &ROOT).unwrap()),
            _ => {}
        }
    }
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();
    for options in ["", "subvol=ro", "subvol=rw"] {
        compare_with_linux(&image, options).unwrap();
    }
}

#[test]
fn subvolumes_with_many_changes_are_committed_side_by_side() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = with_subvolumes();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for name in ["one", "two", "three"] {
        subvolume(&mount, &["create"], name);
    }
    mount.close().unwrap();
    let target = FsTarget::open(image.path(), "").unwrap();
    let fs = target.fs();
    for round in 0..3 {
        // `one`, `two` and `three` share no blocks with other subvolumes; `home` shares blocks with its snapshots.
        std::thread::scope(|scope| {
            for path in ["one", "two", "three", "home/docs", "rw/docs"] {
                scope.spawn(move || {
                    let dir = fs.lookup_path(path.as_bytes(), true).unwrap().id;
                    for i in 0..1200 {
                        let name = format!("round {round} file {i}");
                        let file = fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
                        fs.write(file, 0, &vec![i as u8; i % 9 * 1000]).unwrap();
                    }
                    for i in (0..1200).step_by(3).filter(|_| round > 0) {
                        fs.unlink(dir, format!("round {} file {i}", round - 1).as_bytes()).unwrap();
                    }
                });
            }
        });
        fs.sync().unwrap();
    }
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();
    for options in ["subvol=one", "subvol=two", "subvol=three", "subvol=home", "subvol=ro", "subvol=rw"] {
        compare_with_linux(&image, options).unwrap();
    }
}

#[test]
fn statfs_agrees_with_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let cases: [(&[&str], u64); 5] = [
        (&[], 256 << 20),
        (&[], 2 << 30),
        (&["-m", "single"], 1 << 30),
        (&["-d", "dup"], 1 << 30),
        (&["--mixed"], 200 << 20),
    ];
    for (args, len_bytes) in cases {
        let image = Image::kernel_made(len_bytes, args).unwrap();
        let mount = LoopMount::new(image.path(), "").unwrap();
        std::fs::write(mount.join("data"), vec![1; 20 << 20]).unwrap();
        run("sync", std::iter::empty::<&str>()).unwrap();
        let theirs = rustix::fs::statvfs(mount.path()).unwrap();
        let fsid = rustix::fs::statfs(mount.path()).unwrap();
        mount.close().unwrap();
        let ours = statfs(image.path());
        assert_eq!(u64::from(ours.bsize), theirs.f_frsize, "{args:?}");
        assert_eq!(ours.blocks, theirs.f_blocks, "{args:?}");
        let near = |ours: u64, theirs: u64| ours.abs_diff(theirs) * 100 <= theirs;
        eprintln!(
            "{args:?}: bfree {} {} bavail {} {} {fsid:?}",
            ours.bfree, theirs.f_bfree, ours.bavail, theirs.f_bavail
        );
        assert!(near(ours.bfree, theirs.f_bfree), "{args:?}: bfree {} {}", ours.bfree, theirs.f_bfree);
        assert!(near(ours.bavail, theirs.f_bavail), "{args:?}: bavail {} {}", ours.bavail, theirs.f_bavail);
        assert_eq!(u64::from(ours.namelen), theirs.f_namemax);
    }
}

fn statfs(image: &Path) -> ubtrfs_fs::StatFs {
    let target = FsTarget::open(image, "ro").unwrap();
    target.fs().statfs().unwrap()
}

#[test]
fn options_that_are_wrong_leave_the_image_alone() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let before = image.digest().unwrap();
    for options in ["subvol=nothing", "subvolid=999", "compress=brotli", "frobnicate"] {
        assert!(FsTarget::open(image.path(), options).is_err(), "{options}");
    }
    assert_eq!(image.digest().unwrap(), before);
    assert!(MountOptions::parse("ro").unwrap().read_only);
}
