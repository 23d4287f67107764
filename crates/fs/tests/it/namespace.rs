//! Operations on names and attributes of images made by `mkfs.btrfs`: compares their effect in ubtrfs with the view of
//! Linux.
//!
//! Method: operate in-process, close, run `btrfs check`, open again, and compare with Linux's mount if there is one.

use anyhow::Result;
use rustix::io::Errno;
use ubtrfs_fs::{Attr, Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags, SetAttr, SetTime, XattrFlags, mode};
use ubtrfs_testkit::{
    Compare, FsTarget, Image, LoopMount, Rng, btrfs_check, capability, colliding_names, compare_entries, errno,
    walk_path,
};
use ubtrfs_transaction::INODES_PER_ROW;

const ROOT: Caller = Caller::ROOT;
const IMAGE_BYTES: u64 = 256 << 20;

fn open(image: &Image) -> FsTarget {
    FsTarget::open(image.path(), "").unwrap()
}

/// Closes and checks the filesystem, and compares the directory tree that ubtrfs shows with the one that Linux shows.
fn close_and_verify(image: &Image, target: FsTarget) -> Result<()> {
    target.close()?;
    btrfs_check(image.path())?;
    let again = FsTarget::open(image.path(), "ro")?;
    let ours = again.walk()?;
    again.close()?;
    if capability::kernel_oracle() {
        let mount = LoopMount::new(image.path(), "")?;
        compare_entries(&ours, &walk_path(mount.path())?, Compare::ALL)?;
        let complaints = mount.kernel_complaints();
        assert!(complaints.is_empty(), "{complaints:?}");
        mount.close()?;
        btrfs_check(image.path())?;
    }
    Ok(())
}

fn file(fs: &Fs, dir: InodeId, name: &[u8]) -> Attr {
    fs.create(dir, name, NewInode::file(0o644), &ROOT).unwrap()
}

fn dir(fs: &Fs, parent: InodeId, name: &[u8]) -> InodeId {
    fs.create(parent, name, NewInode::dir(0o755), &ROOT).unwrap().id
}

fn names(fs: &Fs, dir: InodeId) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        names.push(entry.name.to_vec());
        true
    })
    .unwrap();
    names
}

#[test]
fn every_kind_of_inode_is_made_and_found() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let root = fs.root();
    let a = dir(fs, root, b"a");
    file(fs, a, b"file");
    file(fs, a, &[0xff; 255]);
    fs.create(a, b"link", NewInode::symlink(b"../somewhere/else"), &ROOT).unwrap();
    for (name, kind) in [(&b"fifo"[..], mode::FIFO), (b"socket", mode::SOCKET)] {
        fs.create(a, name, NewInode { mode: kind | 0o600, ..NewInode::default() }, &ROOT).unwrap();
    }
    let rdev = ubtrfs_fs::rdev_from_parts(259, 70_000);
    let node =
        fs.create(a, b"disk", NewInode { mode: mode::BLOCK | 0o660, rdev, ..NewInode::default() }, &ROOT).unwrap();
    assert_eq!(fs.getattr(node.id).unwrap().rdev, rdev);
    assert_eq!(fs.readlink(fs.lookup(a, b"link").unwrap().id).unwrap(), b"../somewhere/else");
    assert_eq!(fs.lookup_path(b"/a/../a/./file", true).unwrap().id, fs.lookup(a, b"file").unwrap().id);
    assert_eq!(fs.parent(a).unwrap(), root);
    assert_eq!(fs.getattr(a).unwrap().size, 2 * (4 + 255 + 4 + 4 + 6 + 4));
    assert_eq!(fs.getattr(a).unwrap().nlink, 1);
    assert_eq!(errno(fs.lookup(a, b"nothing")), Errno::NOENT);
    assert_eq!(errno(fs.lookup(a, &[b'x'; 256])), Errno::NAMETOOLONG);
    assert_eq!(errno(fs.create(a, b"file", NewInode::file(0o600), &ROOT)), Errno::EXIST);
    assert_eq!(names(fs, a).len(), 8);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn a_path_through_a_link_to_a_file_is_no_directory() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let a = dir(fs, fs.root(), b"a");
    let below = dir(fs, a, b"below");
    file(fs, a, b"x");
    let in_below = file(fs, below, b"x").id;
    fs.create(a, b"to-file", NewInode::symlink(b"x"), &ROOT).unwrap();
    fs.create(a, b"to-dir", NewInode::symlink(b"below/../below"), &ROOT).unwrap();
    for path in ["a/to-file/x", "a/to-file/", "a/to-file/.", "a/to-file/..", "a/x/", "a/x/.", "a/x/.."] {
        assert_eq!(errno(fs.lookup_path(path.as_bytes(), true)), Errno::NOTDIR, "{path}");
    }
    assert_eq!(fs.lookup_path(b"a/to-dir/x", true).unwrap().id, in_below);
    for path in ["a/to-dir/", "a/to-dir/.", "a/to-dir/../below", "a/to-dir"] {
        assert_eq!(fs.lookup_path(path.as_bytes(), true).unwrap().id, below, "{path}");
    }
    close_and_verify(&image, target).unwrap();
}

#[test]
fn colliding_names_share_an_item() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let a = dir(fs, fs.root(), b"a");
    let mut rng = Rng::new(7);
    let colliding = colliding_names(&mut rng, 4);
    let ids: Vec<_> = colliding.iter().map(|name| file(fs, a, name).id).collect();
    for (name, id) in colliding.iter().zip(&ids) {
        assert_eq!(fs.lookup(a, name).unwrap().id, *id);
    }
    fs.unlink(a, &colliding[1]).unwrap();
    assert_eq!(errno(fs.lookup(a, &colliding[1])), Errno::NOENT);
    fs.rename(a, &colliding[0], a, &colliding[1], RenameFlags::empty()).unwrap();
    assert_eq!(fs.lookup(a, &colliding[1]).unwrap().id, ids[0]);
    assert_eq!(fs.lookup(a, &colliding[2]).unwrap().id, ids[2]);
    fs.rename(a, &colliding[2], a, &colliding[3], RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs.lookup(a, &colliding[2]).unwrap().id, ids[3]);
    for name in &colliding {
        let attribute = [b"user.", name.as_slice()].concat();
        fs.setxattr(a, &attribute, name, XattrFlags::CREATE, &ROOT).unwrap();
    }
    assert_eq!(fs.listxattr(a).unwrap().len(), 4);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn links_go_to_extrefs_when_the_item_is_full() {
    let image = Image::kernel_made(IMAGE_BYTES, &["-n", "4096"]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let (a, b) = (dir(fs, fs.root(), b"a"), dir(fs, fs.root(), b"b"));
    let id = file(fs, a, b"first").id;
    for i in 0..300 {
        fs.link(id, a, format!("a long name that fills the item soon {i:05}").as_bytes()).unwrap();
        fs.link(id, b, format!("{i}").as_bytes()).unwrap();
    }
    assert_eq!(fs.getattr(id).unwrap().nlink, 601);
    for i in (0..300).step_by(2) {
        fs.unlink(a, format!("a long name that fills the item soon {i:05}").as_bytes()).unwrap();
    }
    fs.rename(a, b"a long name that fills the item soon 00299", b, b"moved", RenameFlags::empty()).unwrap();
    assert_eq!(fs.getattr(id).unwrap().nlink, 451);
    assert_eq!(errno(fs.link(a, a, b"dir")), Errno::PERM);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn the_number_of_links_is_limited() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let id = file(fs, fs.root(), b"0").id;
    for i in 1..65_535 {
        fs.link(id, fs.root(), i.to_string().as_bytes()).unwrap();
    }
    assert_eq!(errno(fs.link(id, fs.root(), b"one too many")), Errno::MLINK);
    // The image is not checked here, because btrfs-progs takes minutes for so many links of one inode.
    target.close().unwrap();
    let target = open(&image);
    let fs = target.fs();
    assert_eq!(fs.getattr(id).unwrap().nlink, 65_535);
    for i in 0..65_535 {
        fs.unlink(fs.root(), i.to_string().as_bytes()).unwrap();
    }
    assert_eq!(errno(fs.getattr(id)), Errno::STALE);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn renames_of_every_kind() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let root = fs.root();
    let (a, b) = (dir(fs, root, b"a"), dir(fs, root, b"b"));
    let c = dir(fs, a, b"c");
    let plain = RenameFlags::empty();
    let f = file(fs, a, b"f").id;
    let g = file(fs, b, b"g").id;

    fs.rename(a, b"f", b, b"f2", plain).unwrap();
    assert_eq!(fs.lookup(b, b"f2").unwrap().id, f);
    assert_eq!(errno(fs.rename(b, b"f2", b, b"g", RenameFlags::NOREPLACE)), Errno::EXIST);
    fs.rename(b, b"f2", b, b"g", plain).unwrap();
    assert_eq!(errno(fs.getattr(g)), Errno::STALE, "the replaced file is gone");

    assert_eq!(errno(fs.rename(root, b"a", c, b"x", plain)), Errno::INVAL, "into its own descendant");
    assert_eq!(errno(fs.rename(a, b"c", root, b"a", plain)), Errno::NOTEMPTY, "over its own ancestor");
    assert_eq!(errno(fs.rename(a, b"c", root, b"a", RenameFlags::EXCHANGE)), Errno::INVAL);
    assert_eq!(errno(fs.rename(b, b"g", a, b"c", plain)), Errno::ISDIR, "file over directory");
    assert_eq!(errno(fs.rename(a, b"c", b, b"g", plain)), Errno::NOTDIR, "directory over file");
    assert_eq!(errno(fs.rename(a, b"none", b, b"x", plain)), Errno::NOENT);
    assert_eq!(errno(fs.rename(root, b"b", root, b"a", plain)), Errno::NOTEMPTY, "over a directory with entries");

    let d = dir(fs, b, b"d");
    fs.rename(a, b"c", b, b"d", plain).unwrap();
    assert_eq!(errno(fs.getattr(d)), Errno::STALE, "the replaced directory is gone");
    assert_eq!(fs.parent(c).unwrap(), b);
    fs.rename(b, b"d", root, b"a", RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs.parent(c).unwrap(), fs.parent(a).unwrap()), (root, b));

    fs.link(f, b, b"same").unwrap();
    fs.rename(b, b"g", b, b"same", plain).unwrap();
    assert_eq!(fs.getattr(f).unwrap().nlink, 2, "two names of one file: nothing happens");

    fs.rename(b, b"g", b, b"moved", RenameFlags::WHITEOUT).unwrap();
    let whiteout = fs.lookup(b, b"g").unwrap();
    assert_eq!((whiteout.mode & mode::TYPE, whiteout.rdev, whiteout.nlink), (mode::CHAR, 0, 1));
    assert_eq!(errno(fs.rename(b, b"g", b, b"h", RenameFlags::EXCHANGE | RenameFlags::NOREPLACE)), Errno::INVAL);
    assert_eq!(errno(fs.rename(b, b".", b, b"h", plain)), Errno::BUSY);
    fs.rename(b, b"moved", b, b"moved", plain).unwrap();
    close_and_verify(&image, target).unwrap();
}

#[test]
fn directories_are_removed_only_when_empty() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let root = fs.root();
    let a = dir(fs, root, b"a");
    file(fs, a, b"f");
    assert_eq!(errno(fs.rmdir(root, b"a")), Errno::NOTEMPTY);
    assert_eq!(errno(fs.unlink(root, b"a")), Errno::ISDIR);
    assert_eq!(errno(fs.rmdir(a, b"f")), Errno::NOTDIR);
    fs.open_inode(a).unwrap();
    fs.unlink(a, b"f").unwrap();
    fs.rmdir(root, b"a").unwrap();
    assert_eq!(fs.getattr(a).unwrap().nlink, 0, "still open");
    assert_eq!(errno(fs.create(a, b"new", NewInode::file(0o600), &ROOT)), Errno::NOENT);
    fs.release_inode(a);
    assert_eq!(errno(fs.getattr(a)), Errno::STALE);
    assert_eq!(fs.getattr(root).unwrap().size, 0);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn reading_a_directory_goes_on_while_it_changes() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let a = dir(fs, fs.root(), b"a");
    for i in 0..1000 {
        file(fs, a, format!("{i}").as_bytes());
    }
    let (mut seen, mut cookie) = (Vec::new(), 0);
    loop {
        let mut taken = 0;
        fs.readdir(a, cookie, &mut |entry| {
            if taken == 50 {
                return false;
            }
            taken += 1;
            cookie = entry.next_cookie;
            seen.push(String::from_utf8(entry.name.to_vec()).unwrap());
            true
        })
        .unwrap();
        if taken < 50 {
            break;
        }
        for name in seen.iter().rev().take(20).filter(|name| !name.starts_with('.')) {
            let _ = fs.unlink(a, name.as_bytes());
        }
        if seen.len() == 500 {
            fs.sync().unwrap();
        }
    }
    seen.retain(|name| !name.starts_with('.'));
    let expected: Vec<_> = (0..1000).map(|i| i.to_string()).collect();
    assert_eq!(seen, expected, "each once, in order of creation");
    close_and_verify(&image, target).unwrap();
}

#[test]
fn attributes_are_kept_and_follow_the_rules() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let id = file(fs, fs.root(), b"f").id;
    let at = |sec, nsec| Some(SetTime::At(ubtrfs_format::item::Timespec { sec, nsec }));
    let set = |set: SetAttr| fs.setattr(id, &set, &ROOT).unwrap();
    set(SetAttr { mode: Some(0o6755), ..SetAttr::default() });
    let attr = set(SetAttr { atime: at(-5, 7), mtime: at(1 << 33, 999_999_999), ..SetAttr::default() });
    assert_eq!((attr.atime.sec, attr.atime.nsec, attr.mtime.sec, attr.mtime.nsec), (-5, 7, 1 << 33, 999_999_999));
    assert_eq!(attr.mode, 0o106_755);
    let attr = set(SetAttr { uid: Some(1000), gid: Some(77), ..SetAttr::default() });
    assert_eq!((attr.mode, attr.uid, attr.gid), (0o100_755, 1000, 77), "a new owner clears set-uid and set-gid");
    fs.setxattr(id, b"security.capability", b"cap", XattrFlags::empty(), &ROOT).unwrap();
    set(SetAttr { uid: Some(0), ..SetAttr::default() });
    assert_eq!(errno(fs.getxattr(id, b"security.capability")), Errno::NODATA);

    fs.setattr(fs.root(), &SetAttr { mode: Some(0o2777), gid: Some(42), ..SetAttr::default() }, &ROOT).unwrap();
    let user = Caller { uid: 5, gid: 6, umask: 0o027 };
    let sub = fs.create(fs.root(), b"sub", NewInode::dir(0o777), &user).unwrap();
    assert_eq!((sub.mode, sub.uid, sub.gid), (0o042_750, 5, 42), "set-gid is inherited, the umask applied");
    close_and_verify(&image, target).unwrap();
}

/// B1 of `bare_inodes`.
#[test]
fn an_attribute_of_an_inode_that_was_known_to_have_none_is_found() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let ids: Vec<InodeId> =
        (0..200).map(|nr| file(target.fs(), target.fs().root(), format!("f{nr}").as_bytes()).id).collect();
    close_and_verify(&image, target).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let ask = |id: InodeId| fs.getxattr(id, b"user.name");
    for _ in 0..2 {
        assert!(ids.iter().all(|&id| errno(ask(id)) == Errno::NODATA));
    }
    let snapshot = fs.snapshot(fs.root().root, fs.root(), b"snapshot", false).unwrap();
    std::thread::scope(|scope| {
        for part in ids.chunks(50) {
            scope.spawn(move || {
                for &id in part {
                    fs.setxattr(id, b"user.name", b"value", XattrFlags::CREATE, &ROOT).unwrap();
                    assert_eq!(fs.getxattr(id, b"user.name").unwrap(), b"value");
                }
            });
        }
    });
    for &id in &ids {
        let copy = InodeId { root: snapshot.root, ino: id.ino };
        assert_eq!(errno(ask(copy)), Errno::NODATA, "the snapshot is older");
        fs.removexattr(id, b"user.name", &ROOT).unwrap();
        assert_eq!(errno(ask(id)), Errno::NODATA);
        fs.setxattr(copy, b"user.name", b"copy", XattrFlags::empty(), &ROOT).unwrap();
        assert_eq!((ask(copy).unwrap(), errno(ask(id))), (b"copy".to_vec(), Errno::NODATA));
    }
    close_and_verify(&image, target).unwrap();
}

#[test]
fn a_change_of_content_ends_the_capabilities_of_append_only_files_too() {
    const NAME: &[u8] = b"security.capability";
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let id = file(fs, fs.root(), b"f").id;
    assert!(!fs.drop_capability(id).unwrap(), "it has none");
    fs.setxattr(id, NAME, b"cap", XattrFlags::empty(), &ROOT).unwrap();
    let append = 0x20;
    fs.set_inode_flags(id, append, &ROOT).unwrap();
    assert_eq!(errno(fs.removexattr(id, NAME, &ROOT)), Errno::PERM);
    fs.write_opened(id, 0, b"appended", false).unwrap();
    assert!(fs.drop_capability(id).unwrap());
    assert_eq!(errno(fs.getxattr(id, NAME)), Errno::NODATA);
    assert!(!fs.drop_capability(id).unwrap(), "it has none any more");
    close_and_verify(&image, target).unwrap();
}

#[test]
fn a_write_to_an_open_file_ends_its_privileges_although_the_subvolume_became_read_only() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let dir = fs.create_subvolume(fs.root(), b"subvolume", &ROOT).unwrap();
    let id = file(fs, dir, b"f").id;
    fs.setattr(id, &SetAttr { mode: Some(0o6755), ..SetAttr::default() }, &ROOT).unwrap();
    fs.set_subvolume_read_only(dir.root, true).unwrap();
    fs.write_opened(id, 0, b"written", false).unwrap();
    fs.drop_privileges(id, 0).unwrap();
    assert_eq!(fs.getattr(id).unwrap().mode & 0o7777, 0o755);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn flags_protect_and_are_inherited() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let root = fs.root();
    let (immutable, append, nocow, compr) = (0x10, 0x20, 0x80_0000, 0x4);
    let a = dir(fs, root, b"a");
    let id = file(fs, a, b"f").id;
    let user = Caller { uid: 7, gid: 7, umask: 0 };
    assert_eq!(errno(fs.set_inode_flags(id, immutable, &user)), Errno::PERM);
    fs.set_inode_flags(id, immutable, &ROOT).unwrap();
    assert_eq!(errno(fs.unlink(a, b"f")), Errno::PERM);
    assert_eq!(errno(fs.link(id, a, b"g")), Errno::PERM);
    assert_eq!(errno(fs.rename(a, b"f", a, b"g", RenameFlags::empty())), Errno::PERM);
    assert_eq!(errno(fs.setattr(id, &SetAttr { mode: Some(0), ..SetAttr::default() }, &ROOT)), Errno::PERM);
    assert_eq!(errno(fs.setxattr(id, b"user.x", b"", XattrFlags::empty(), &ROOT)), Errno::PERM);
    fs.set_inode_flags(id, 0, &ROOT).unwrap();
    fs.set_inode_flags(a, append, &ROOT).unwrap();
    file(fs, a, b"more");
    assert_eq!(errno(fs.unlink(a, b"f")), Errno::PERM);
    fs.set_inode_flags(a, immutable, &ROOT).unwrap();
    assert_eq!(errno(fs.create(a, b"x", NewInode::file(0), &ROOT)), Errno::PERM);
    fs.set_inode_flags(a, nocow, &ROOT).unwrap();
    let inherited = file(fs, a, b"nocow").id;
    assert_eq!(fs.inode_flags(inherited).unwrap(), nocow);
    assert_eq!(fs.getattr(inherited).unwrap().flags, 3, "no copy-on-write means no checksums");
    assert_eq!(errno(fs.set_inode_flags(a, nocow | compr, &ROOT)), Errno::INVAL);

    let b = dir(fs, root, b"b");
    fs.set_inode_flags(b, compr, &ROOT).unwrap();
    assert_eq!(fs.getxattr(b, b"btrfs.compression").unwrap(), b"zlib");
    fs.setxattr(b, b"btrfs.compression", b"zstd", XattrFlags::empty(), &ROOT).unwrap();
    let id = file(fs, b, b"f").id;
    assert_eq!(fs.getxattr(id, b"btrfs.compression").unwrap(), b"zstd");
    assert_eq!(fs.inode_flags(id).unwrap(), compr);
    assert_eq!(errno(fs.setxattr(id, b"btrfs.compression", b"brotli", XattrFlags::empty(), &ROOT)), Errno::INVAL);
    assert_eq!(errno(fs.setxattr(id, b"btrfs.other", b"x", XattrFlags::empty(), &ROOT)), Errno::INVAL);
    fs.setxattr(id, b"btrfs.compression", b"", XattrFlags::empty(), &ROOT).unwrap();
    assert_eq!((fs.inode_flags(id).unwrap(), errno(fs.getxattr(id, b"btrfs.compression"))), (0, Errno::NODATA));
    close_and_verify(&image, target).unwrap();
}

#[test]
fn names_of_one_hash_fill_their_item_as_on_linux() {
    let image = Image::kernel_made(IMAGE_BYTES, &["-n", "16384"]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let a = dir(fs, fs.root(), b"a");
    // Each name of 12 bytes takes 42 bytes of the item, which has 16,258 bytes at most.
    let names = colliding_names(&mut Rng::new(154), 388);
    let (last, fitting) = names.split_last().unwrap();
    let first = file(fs, a, &fitting[0]).id;
    for name in &fitting[1..] {
        fs.link(first, a, name).unwrap();
    }
    assert_eq!(errno(fs.link(first, a, last)), Errno::OVERFLOW);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn a_new_subvolume_inherits_the_compression_of_its_parent_subvolume() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let property = b"btrfs.compression";
    let compr = 0x4;
    let inner = dir(fs, fs.root(), b"dir");
    fs.setxattr(inner, property, b"zstd", XattrFlags::empty(), &ROOT).unwrap();
    let plain = fs.create_subvolume(inner, b"plain", &ROOT).unwrap();
    assert_eq!(errno(fs.getxattr(plain, property)), Errno::NODATA, "the directory is not the parent's root");

    fs.setxattr(fs.root(), property, b"lzo", XattrFlags::empty(), &ROOT).unwrap();
    let nested = fs.create_subvolume(inner, b"nested", &ROOT).unwrap();
    assert_eq!(fs.getxattr(nested, property).unwrap(), b"lzo");
    assert_eq!(fs.inode_flags(nested).unwrap() & compr, compr);
    let deeper = fs.create_subvolume(nested, b"deeper", &ROOT).unwrap();
    assert_eq!(fs.getxattr(deeper, property).unwrap(), b"lzo");
    let inherited = file(fs, deeper, b"f").id;
    assert_eq!(fs.getxattr(inherited, property).unwrap(), b"lzo");
    close_and_verify(&image, target).unwrap();
}

#[test]
fn xattrs_have_limits_and_namespaces() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let id = file(fs, fs.root(), b"f").id;
    let none = XattrFlags::empty();
    let set = |name: &[u8], value: &[u8], flags| fs.setxattr(id, name, value, flags, &ROOT);
    set(b"user.a", b"1", XattrFlags::CREATE).unwrap();
    assert_eq!(errno(set(b"user.a", b"1", XattrFlags::CREATE)), Errno::EXIST);
    assert_eq!(errno(set(b"user.b", b"1", XattrFlags::REPLACE)), Errno::NODATA);
    set(b"user.a", b"", XattrFlags::REPLACE).unwrap();
    assert_eq!(fs.getxattr(id, b"user.a").unwrap(), b"");
    let room = 16384 - 101 - 25 - 30;
    set(b"user.big", &vec![7; room - 8], none).unwrap();
    assert_eq!(errno(set(b"user.big", &vec![7; room - 7], none)), Errno::NOSPC);
    assert_eq!(errno(set(b"user.big", &vec![7; 65537], none)), Errno::TOOBIG);
    assert_eq!(errno(set(&[b"user.", &[b'n'; 251][..]].concat(), b"", none)), Errno::RANGE);
    set(&[b"user.", &[b'n'; 250][..]].concat(), b"", none).unwrap();
    assert_eq!(errno(set(b"user.", b"", none)), Errno::INVAL);
    assert_eq!(errno(set(b"other.x", b"", none)), Errno::OPNOTSUPP);
    set(b"trusted.t", b"t", none).unwrap();
    let user = Caller { uid: 7, gid: 7, umask: 0 };
    assert_eq!(errno(fs.setxattr(id, b"trusted.t", b"u", none, &user)), Errno::PERM);
    set(b"security.s", b"s", none).unwrap();
    assert_eq!(fs.listxattr(id).unwrap().len(), 5);
    fs.removexattr(id, b"user.a", &ROOT).unwrap();
    assert_eq!(errno(fs.removexattr(id, b"user.a", &ROOT)), Errno::NODATA);
    let link = fs.create(fs.root(), b"l", NewInode::symlink(b"x"), &ROOT).unwrap().id;
    assert_eq!(errno(fs.setxattr(link, b"user.a", b"", none, &ROOT)), Errno::PERM);
    fs.setxattr(link, b"trusted.a", b"v", none, &ROOT).unwrap();
    close_and_verify(&image, target).unwrap();
}

fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut raw = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        raw.extend_from_slice(&tag.to_le_bytes());
        raw.extend_from_slice(&permissions.to_le_bytes());
        raw.extend_from_slice(&id.to_le_bytes());
    }
    raw
}

#[test]
fn acls_and_modes_determine_each_other() {
    const NO_ID: u32 = u32::MAX;
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let none = XattrFlags::empty();
    let id = file(fs, fs.root(), b"f").id;
    let named = acl(&[(1, 6, NO_ID), (2, 7, 1000), (4, 4, NO_ID), (16, 5, NO_ID), (32, 0, NO_ID)]);
    let (access, default) = (b"system.posix_acl_access", b"system.posix_acl_default");
    fs.setxattr(id, access, &named, none, &ROOT).unwrap();
    assert_eq!(fs.getattr(id).unwrap().mode, 0o100_650);
    fs.setattr(id, &SetAttr { mode: Some(0o604), ..SetAttr::default() }, &ROOT).unwrap();
    let changed = acl(&[(1, 6, NO_ID), (2, 7, 1000), (4, 4, NO_ID), (16, 0, NO_ID), (32, 4, NO_ID)]);
    assert_eq!(fs.getxattr(id, access).unwrap(), changed);
    fs.setxattr(id, access, &acl(&[(1, 7, NO_ID), (4, 5, NO_ID), (32, 5, NO_ID)]), none, &ROOT).unwrap();
    assert_eq!((fs.getattr(id).unwrap().mode, errno(fs.getxattr(id, access))), (0o100_755, Errno::NODATA));
    assert_eq!(errno(fs.setxattr(id, access, b"junk", none, &ROOT)), Errno::OPNOTSUPP);
    assert_eq!(errno(fs.setxattr(id, default, &named, none, &ROOT)), Errno::ACCESS);

    let a = dir(fs, fs.root(), b"a");
    fs.setxattr(a, default, &named, none, &ROOT).unwrap();
    let caller = Caller { umask: 0o077, ..ROOT };
    let inner = fs.create(a, b"f", NewInode::file(0o666), &caller).unwrap();
    assert_eq!(inner.mode, 0o100_640, "the default ACL stands in for the umask");
    let masked = acl(&[(1, 6, NO_ID), (2, 7, 1000), (4, 4, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID)]);
    assert_eq!(fs.getxattr(inner.id, access).unwrap(), masked);
    let sub = fs.create(a, b"d", NewInode::dir(0o777), &caller).unwrap();
    assert_eq!(fs.getxattr(sub.id, default).unwrap(), named);
    // A subvolume inherits no ACL, but its mode grants no more rights than the ACL would.
    let subvolume = fs.create_subvolume(a, b"s", &Caller { umask: 0, ..ROOT }).unwrap();
    let mode = fs.getattr(subvolume).unwrap().mode & 0o777;
    assert_eq!(format!("{mode:o}"), "650", "as Linux makes it");
    fs.removexattr(a, default, &ROOT).unwrap();
    assert_eq!(fs.create(a, b"g", NewInode::file(0o666), &caller).unwrap().mode, 0o100_600);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn unlinked_files_live_while_they_are_used() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    let device: std::sync::Arc<dyn ubtrfs_device::Device> =
        std::sync::Arc::new(ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite).unwrap());
    let target = FsTarget::on_device(device, options).unwrap();
    let fs = target.fs();
    let root = fs.root();
    let id = file(fs, root, b"f").id;
    fs.setxattr(id, b"user.x", b"y", XattrFlags::empty(), &ROOT).unwrap();
    assert_eq!(fs.lookup(root, b"f").unwrap().id, id);
    fs.unlink(root, b"f").unwrap();
    fs.sync().unwrap();
    assert_eq!(fs.getattr(id).unwrap().nlink, 0, "two lookups");
    assert_eq!(errno(fs.link(id, root, b"again")), Errno::NOENT);
    fs.forget(id, 1);
    assert_eq!(fs.getxattr(id, b"user.x").unwrap(), b"y");
    fs.forget(id, 1);
    assert_eq!(errno(fs.getattr(id)), Errno::STALE);

    let temporary = fs.tmpfile(root, 0o600, &ROOT).unwrap().id;
    assert_eq!(fs.link(temporary, root, b"named").unwrap().nlink, 1);
    fs.release_inode(temporary);
    fs.forget(temporary, 2);
    assert_eq!(fs.lookup(root, b"named").unwrap().id, temporary);
    // This file is left open, so `close` deletes it.
    fs.tmpfile(root, 0o600, &ROOT).unwrap();
    close_and_verify(&image, target).unwrap();
}

/// The kernel may have the file open, although this crate counts only a lookup of the file. So the inode may leave
/// memory before the file gets its name.
#[test]
fn a_file_without_a_name_gets_one_after_its_inode_left_memory() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    let device: std::sync::Arc<dyn ubtrfs_device::Device> =
        std::sync::Arc::new(ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite).unwrap());
    let target = FsTarget::on_device(device, options).unwrap();
    let (fs, root) = (target.fs(), target.fs().root());
    let id = fs.tmpfile(root, 0o600, &ROOT).unwrap().id;
    fs.release_inode(id);
    for number in 0..2000 {
        let other = fs.create(root, format!("other-{number}").as_bytes(), NewInode::file(0o600), &ROOT).unwrap().id;
        fs.forget(other, 1);
    }
    assert_eq!(fs.link(id, root, b"named").unwrap().nlink, 1);
    fs.unlink(root, b"named").unwrap();
    assert_eq!(errno(fs.link(id, root, b"again")), Errno::NOENT, "it had a name");
    fs.forget(id, 2);
    assert_eq!(errno(fs.getattr(id)), Errno::STALE);
    close_and_verify(&image, target).unwrap();
}

#[test]
fn orphans_of_an_earlier_session_are_deleted() {
    let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
    let target = open(&image);
    let fs = target.fs();
    let ids: Vec<_> = (0..100).map(|_| fs.tmpfile(fs.root(), 0o600, &ROOT).unwrap().id).collect();
    for id in &ids {
        fs.setxattr(*id, b"user.x", b"y", XattrFlags::empty(), &ROOT).unwrap();
    }
    fs.sync().unwrap();
    // A copy of the image shows the state that a session leaves if it ends at this point without a close.
    let copy = Image::copy_of(image.path()).unwrap();
    let target_after = open(&copy);
    for id in &ids {
        assert_eq!(errno(target_after.fs().getattr(*id)), Errno::STALE);
    }
    close_and_verify(&copy, target_after).unwrap();
    target.close().unwrap();
}

#[test]
fn busy_directories_give_numbers_in_rows() -> Result<()> {
    let image = Image::kernel_made(IMAGE_BYTES, &[])?;
    let target = open(&image);
    let fs = target.fs();
    let (a, b) = (dir(fs, fs.root(), b"a"), dir(fs, fs.root(), b"b"));
    let make = |range: std::ops::Range<u64>| {
        let both = |number: u64| {
            let name = number.to_string();
            (file(fs, a, name.as_bytes()).id.ino.0, file(fs, b, name.as_bytes()).id.ino.0)
        };
        range.map(both).collect::<Vec<_>>()
    };
    let few = make(0..64);
    assert_eq!((few[0].0..).take(128).collect::<Vec<_>>(), few.iter().flat_map(|(a, b)| [*a, *b]).collect::<Vec<_>>());
    let many = make(64..464);
    let neighbours = many.windows(2).filter(|pair| pair[0].0 + 1 == pair[1].0).count();
    assert!(neighbours > 360, "{neighbours}");
    let mut all: Vec<_> = few.iter().chain(&many).flat_map(|(a, b)| [*a, *b]).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 928);
    fs.sync()?;
    // The new inode's number is above all numbers that were given in earlier transactions.
    assert!(make(464..465)[0].0 > all[927]);
    close_and_verify(&image, target)
}

#[test]
fn many_directories_are_in_rows_of_their_own() -> Result<()> {
    let image = Image::kernel_made(IMAGE_BYTES, &[])?;
    let target = open(&image);
    let fs = target.fs();
    let make = |number: u64| dir(fs, fs.root(), number.to_string().as_bytes()).ino.0;
    let inos: Vec<u64> = (0..20).map(make).collect();
    assert!(inos[..8].windows(2).all(|pair| pair[0] + 1 == pair[1]), "as Linux numbers them: {inos:?}");
    assert!(inos[8..].iter().all(|ino| ino.is_multiple_of(INODES_PER_ROW)), "{inos:?}");
    assert!(inos.windows(2).all(|pair| pair[0] < pair[1]), "{inos:?}");
    close_and_verify(&image, target)
}
