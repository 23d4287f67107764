//! Tests the permission rules of commands with a table: each command in the table is called by root, the user who
//! mounted, the owner of the files, a member of the files' group, and another user. The expected error numbers are
//! those of Linux, where Linux has the command.

use std::sync::Arc;

use crate::common::{InGroup, OTHER, OWNER, ROOT, TestHost, dir, filesystem, receive};
use rustix::io::Errno;
use ubtrfs_control::{
    CommandCaller, CommandContext, CommandFailure, OpenFile, Request, Response, balance, device, disk_usage, file,
    filesystem as whole, join, quota, replace, resolve, scrub, search, send, subvolume,
};
use ubtrfs_device::MemoryDevice;
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId, MountOptions};
use ubtrfs_transaction::Job;

/// Owner of the directories and subvolumes.
const USER: u32 = 3000;
/// Member of the group of [`USER`].
const MEMBER: u32 = 4000;
const CALLERS: [u32; 5] = [0, OWNER, USER, MEMBER, OTHER];

struct Bed {
    fs: Arc<Fs>,
    host: TestHost,
}

impl Bed {
    /// Directories `open` (0777), `shared` (0775) and `closed` (0755) of [`USER`], each with subvolumes `a` and `b` of
    /// mode 0755.
    fn new(options: &str) -> Self {
        let fs = filesystem(options);
        for (name, mode) in [("open", 0o777), ("shared", 0o775), ("closed", 0o755)] {
            let dir = dir(&fs, name, USER, mode);
            for name in [b"a", b"b"] {
                let user = ubtrfs_fs::Caller { uid: USER, gid: USER, umask: 0o022 };
                fs.create_subvolume(dir, name, &user).unwrap();
            }
        }
        Self { fs, host: TestHost::of(OWNER) }
    }

    fn id(&self, path: &str) -> InodeId {
        self.fs.lookup_path(path.as_bytes(), true).unwrap().id
    }

    fn call(&self, uid: u32, request: Request, files: &[&str]) -> Result<(), CommandFailure> {
        let files: Vec<OpenFile> =
            files.iter().map(|path| OpenFile { is_writable: false, ..OpenFile::of_image(self.id(path)) }).collect();
        let group = if uid == MEMBER { USER } else { uid };
        let caller = CommandCaller::of_peer(uid, uid, 0, Arc::new(InGroup(group)));
        let context = CommandContext {
            fs: &self.fs,
            host: &self.host,
            caller: &caller,
            files: &files,
            stream: None,
            job: &Job::new(),
        };
        ubtrfs_control::execute(&context, request).map(|_| ())
    }

    /// The error number that each of [`CALLERS`] gets, each on a new filesystem.
    fn each(options: &str, request: &Request, files: &[&str]) -> [i32; 5] {
        CALLERS.map(|uid| {
            let bed = Self::new(options);
            bed.call(uid, request.clone(), files).err().map_or(0, |failure| failure.errno)
        })
    }
}

const OK: i32 = 0;
const PERM: i32 = Errno::PERM.raw_os_error();
const NOTCONN: i32 = Errno::NOTCONN.raw_os_error();
const BADF: i32 = Errno::BADF.raw_os_error();
const ACCES: i32 = Errno::ACCESS.raw_os_error();
const INVAL: i32 = Errno::INVAL.raw_os_error();
const NOENT: i32 = Errno::NOENT.raw_os_error();

fn received() -> Request {
    let uuid = uuid::Uuid::from_u128(1);
    Request::Subvolume(subvolume::Request::SetReceived { of: 0, uuid, stransid: 7, stime: (1, 2) })
}

fn create() -> Request {
    Request::Subvolume(subvolume::Request::Create {
        dir: 0,
        name: b"new".to_vec(),
        umask: 0,
        qgroups: Vec::new(),
        limits: None,
    })
}

fn snapshot() -> Request {
    Request::Subvolume(subvolume::Request::Snapshot {
        source: 0,
        dir: 1,
        name: b"new".to_vec(),
        read_only: true,
        qgroups: Vec::new(),
    })
}

fn delete() -> Request {
    Request::Subvolume(subvolume::Request::Delete { dir: 0, name: b"a".to_vec() })
}

#[test]
fn each_command_is_for_those_whom_its_rule_names() {
    let sub = Request::Subvolume;
    let everyone = [OK; 5];
    let admins = [OK, OK, PERM, PERM, PERM];
    let empty = balance::Filters { usage: Some((0, 0)), ..balance::Filters::default() };
    let empty_groups = balance::StartBalance { data: Some(empty), ..balance::StartBalance::default() };
    // Request, files, and the results for root, the user who mounted, the owner of the files, a member of the files'
    // group, another user.
    let table: Vec<(Request, &[&str], [i32; 5])> = vec![
        (create(), &["/open"], everyone),
        (create(), &["/shared"], [OK, ACCES, OK, OK, ACCES]),
        (create(), &["/closed"], [OK, ACCES, OK, ACCES, ACCES]),
        (snapshot(), &["/open/a", "/open"], [OK, PERM, OK, PERM, PERM]),
        (snapshot(), &["/open/a", "/closed"], [OK, ACCES, OK, ACCES, ACCES]),
        (delete(), &["/open"], [OK, PERM, PERM, PERM, PERM]),
        (sub(subvolume::Request::DeleteById { id: 256 }), &["/"], [OK, PERM, PERM, PERM, PERM]),
        (
            sub(subvolume::Request::SetReadOnly { of: 0, read_only: true, force: false }),
            &["/open/a"],
            [OK, PERM, OK, PERM, PERM],
        ),
        (received(), &["/open/a"], [OK, PERM, OK, PERM, PERM]),
        (received(), &["/open"], [INVAL, PERM, INVAL, PERM, PERM]),
        (sub(subvolume::Request::SetDefault { id: None }), &["/open/a"], admins),
        (sub(subvolume::Request::SetDefault { id: Some(5) }), &["/"], admins),
        (sub(subvolume::Request::List { from: 0 }), &["/"], admins),
        (sub(subvolume::Request::ListDeleted { from: 0 }), &["/"], admins),
        (sub(subvolume::Request::Sync), &["/"], admins),
        (sub(subvolume::Request::Info { of: 0 }), &["/closed"], everyone),
        (sub(subvolume::Request::Default), &["/"], everyone),
        (Request::Quota(quota::Request::Enable { simple: false }), &["/"], admins),
        (Request::Quota(quota::Request::Disable), &["/"], admins),
        (Request::Quota(quota::Request::Status), &["/"], admins),
        (Request::Quota(quota::Request::RescanWait), &["/"], admins),
        (Request::Resolve(resolve::Request::RootId { of: 0 }), &["/"], everyone),
        (Request::Resolve(resolve::Request::Subvolume { id: 256 }), &["/"], admins),
        (Request::Resolve(resolve::Request::Inode { of: 0, ino: 256 }), &["/"], admins),
        (
            Request::Resolve(resolve::Request::Logical { bytenr: 1, whole_extent: false, max: Some(1) }),
            &["/"],
            [NOENT, NOENT, PERM, PERM, PERM],
        ),
        (Request::Filesystem(whole::Request::Sync), &["/"], everyone),
        (Request::Filesystem(whole::Request::Info), &["/"], everyone),
        (Request::Filesystem(whole::Request::Usage), &["/"], everyone),
        (Request::Filesystem(whole::Request::SetLabel { label: b"new".to_vec() }), &["/"], admins),
        (Request::Filesystem(whole::Request::ChangeOptions { options: vec!["commit=30".to_owned()] }), &["/"], admins),
        // These requests lack the stream (EBADF), which is noticed only after the rights are checked.
        (receive(), &["/open"], [BADF, BADF, PERM, PERM, PERM]),
        (receive(), &["/closed"], [BADF, ACCES, PERM, PERM, PERM]),
        (Request::Filesystem(whole::Request::Trim { start: 0, len_bytes: u64::MAX, min_bytes: 0 }), &["/"], admins),
        (Request::DiskUsage(disk_usage::Request { of: 0, names: true }), &["/open"], [BADF; 5]),
        (Request::Search(search::Request::Items(items())), &["/"], admins),
        (Request::Search(search::Request::Path { tree: None, inode: 256 }), &["/"], everyone),
        (Request::Search(search::Request::Path { tree: None, inode: 257 }), &["/"], admins),
        (Request::Search(search::Request::Path { tree: Some(256), inode: 256 }), &["/"], everyone),
        (Request::Search(search::Request::Children { of: 0, from: 0 }), &["/"], everyone),
        (Request::File(file::Request::Compression { of: 0 }), &["/closed"], everyone),
        (
            Request::File(file::Request::SetCompression { of: 0, method: b"zstd".to_vec() }),
            &["/closed"],
            [OK, PERM, OK, PERM, PERM],
        ),
        (Request::Filesystem(whole::Request::Stats), &["/"], everyone),
        (Request::Filesystem(whole::Request::MountOptions), &["/"], everyone),
        (Request::Join(join::Request::Find { subvol: None, subvolid: Some(256) }), &["/"], admins),
        (Request::Join(join::Request::Joined { mount: 1 }), &["/"], admins),
        (Request::Join(join::Request::Mounts), &["/"], admins),
        (Request::Device(device::Request::Stats), &["/"], everyone),
        (Request::Device(device::Request::MinSize { devid: 1 }), &["/"], admins),
        (Request::Device(device::Request::ResetStats { devid: None }), &["/"], admins),
        (Request::Device(device::Request::CancelResize), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        // Nothing is opened before the rights are checked; then the new device does not exist.
        (Request::Device(device::Request::Add(no_device())), &["/"], [INVAL, INVAL, PERM, PERM, PERM]),
        (Request::Device(device::Request::Remove { devids: vec![1] }), &["/"], [INVAL, INVAL, PERM, PERM, PERM]),
        (Request::Device(device::Request::CancelRemoval), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (
            Request::Replace(replace::Request::Start(replace::StartReplace {
                devid: 1,
                new: no_device(),
                avoids_source: false,
            })),
            &["/"],
            [INVAL, INVAL, PERM, PERM, PERM],
        ),
        (Request::Replace(replace::Request::Status), &["/"], admins),
        (Request::Replace(replace::Request::Cancel), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (
            Request::Send(send::Request::FindNew { subvolume: 5, generation: u64::MAX }),
            &["/"],
            [BADF, BADF, PERM, PERM, PERM],
        ),
        (Request::Balance(balance::Request::Status), &["/"], admins),
        (Request::Balance(balance::Request::Start(Box::new(empty_groups))), &["/"], admins),
        (Request::Balance(balance::Request::Pause), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (Request::Balance(balance::Request::Resume), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (Request::Balance(balance::Request::Cancel), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (Request::Scrub(scrub::Request::Status), &["/"], admins),
        (Request::Scrub(scrub::Request::Start(scrub::StartScrub::default())), &["/"], admins),
        (Request::Scrub(scrub::Request::Cancel), &["/"], [NOTCONN, NOTCONN, PERM, PERM, PERM]),
        (
            Request::Scrub(scrub::Request::Limit { devid: None, bytes_per_sec: 0 }),
            &["/"],
            [NOTCONN, NOTCONN, PERM, PERM, PERM],
        ),
    ];
    for (request, files, expected) in table {
        assert_eq!(Bed::each("", &request, files), expected, "{request:?} {files:?}");
    }
}

#[test]
fn subvolumes_to_mount_are_found_as_by_the_options_of_a_mount() {
    let bed = Bed::new("");
    let find = |subvol: Option<&[u8]>, subvolid| {
        let subvol = subvol.map(|path| resolve::PathBytes(path.to_vec()));
        let root = CommandCaller::of_peer(0, 0, 0, Arc::new(InGroup(0)));
        let (fs, host, job) = (&*bed.fs, &bed.host, Job::new());
        let context = CommandContext { fs, host, caller: &root, files: &[], stream: None, job: &job };
        match ubtrfs_control::execute(&context, Request::Join(join::Request::Find { subvol, subvolid })) {
            Ok(Response::Join(join::Response::Found(found))) => Ok((found.path, found.st_ino)),
            other => Err(other.unwrap_err().text),
        }
    };
    let a = bed.id("/open/a");
    assert_eq!(find(None, None), Ok((vec![], 256)), "the top level is the default subvolume");
    assert_eq!(find(Some(b"/open//a/"), None), Ok((b"open/a".to_vec(), a.root.0 << 40 | 256)));
    assert_eq!(find(None, Some(a.root.0)).unwrap().0, b"open/a");
    for (subvol, subvolid, word) in [
        (Some(&b"open"[..]), None, "does not exist"),
        (Some(b"open/none"), None, "does not exist"),
        (None, Some(9999), "9999"),
        (None, Some(2), "2"),
        (Some(b"open/a"), Some(5), "contradicts"),
    ] {
        assert!(find(subvol, subvolid).unwrap_err().contains(word), "{subvol:?} {subvolid:?}");
    }
    bed.fs.set_default_subvolume(a.root).unwrap();
    assert_eq!(find(None, None).unwrap().0, b"open/a");
}

#[test]
fn a_server_that_shows_one_subvolume_takes_no_further_mounts() {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let open = |options: &str| Fs::open(vec![device.clone()], MountOptions::parse(options).unwrap()).unwrap();
    let first = open("");
    first.create_subvolume(first.root(), b"v", &ROOT).unwrap();
    first.close().unwrap();
    drop(first);
    let fs = open("subvol=v");
    let (host, job) = (TestHost::of(OWNER), Job::new());
    let root = CommandCaller::of_peer(0, 0, 0, Arc::new(InGroup(0)));
    let context = CommandContext { fs: &fs, host: &host, caller: &root, files: &[], stream: None, job: &job };
    let find = || Request::Join(join::Request::Find { subvol: None, subvolid: None });
    let refused = ubtrfs_control::execute(&context, find()).unwrap_err();
    assert!(refused.text.contains("one subvolume only"), "{refused}");
    fs.show_top_level();
    ubtrfs_control::execute(&context, find()).unwrap();
}

/// A new device that does not exist.
fn no_device() -> device::NewDevice {
    let file = std::fs::File::open("/dev/null").unwrap();
    device::NewDevice {
        path: resolve::PathBytes(b"/nonexistent/device".to_vec()),
        id: Some(ubtrfs_control::ImageId::of(&file).unwrap()),
        force: false,
        keeps_blocks: false,
    }
}

fn items() -> search::SearchRange {
    let (min, max) = ((0, 0, 0), (u64::MAX, u8::MAX, u64::MAX));
    search::SearchRange { tree: None, min, max, generations: (0, u64::MAX), nr_items: 1, len_bytes: 4096 }
}

#[test]
fn files_are_cloned_by_those_who_have_them_open_for_it() {
    let bed = Bed::new("");
    let user = ubtrfs_fs::Caller { uid: USER, gid: USER, umask: 0 };
    for name in [b"from", &b"to"[..]] {
        let new = ubtrfs_fs::NewInode::file(0o666);
        let id = bed.fs.create(bed.fs.root(), name, new, &user).unwrap().id;
        bed.fs.write(id, 0, &[7; 8192]).unwrap();
    }
    let ranges = file::Ranges { source: 0, target: 0, len: 0 };
    let call = |uid, is_readable, is_writable, request| {
        let group = CommandCaller::of_peer(uid, uid, 0, Arc::new(InGroup(uid)));
        let from = OpenFile { is_readable, is_writable: false, ..OpenFile::of_image(bed.id("/from")) };
        let to = OpenFile { is_writable, ..OpenFile::of_image(bed.id("/to")) };
        let (fs, host, job) = (&*bed.fs, &bed.host, Job::new());
        let context = CommandContext { fs, host, caller: &group, files: &[from, to], stream: None, job: &job };
        ubtrfs_control::execute(&context, Request::File(request)).err().map_or(0, |failure| failure.errno)
    };
    let badf = Errno::BADF.raw_os_error();
    assert_eq!(call(OTHER, true, true, file::Request::Clone(ranges)), OK);
    assert_eq!(call(USER, true, false, file::Request::Clone(ranges)), badf);
    assert_eq!(call(USER, false, true, file::Request::Clone(ranges)), badf);
    // Dedupe does not change content, so ownership of the target suffices.
    let dedupe = |uid, is_writable| call(uid, true, is_writable, file::Request::Dedupe(ranges));
    assert_eq!([dedupe(OTHER, true), dedupe(OTHER, false), dedupe(USER, false), dedupe(0, false)], [OK, PERM, OK, OK]);
}

#[test]
fn users_delete_subvolumes_where_they_are_allowed_to() {
    let allowed = "user_subvol_rm_allowed";
    // The user who mounted may delete only their own subvolumes. Other users need write permission on the directory and
    // the subvolume.
    assert_eq!(Bed::each(allowed, &delete(), &["/open"]), [OK, PERM, OK, ACCES, ACCES]);
    assert_eq!(Bed::each(allowed, &delete(), &["/closed"]), [OK, PERM, OK, ACCES, ACCES]);
    let by_id = Request::Subvolume(subvolume::Request::DeleteById { id: 256 });
    assert_eq!(Bed::each(allowed, &by_id, &["/"]), [OK, PERM, OK, ACCES, ACCES]);
    let bed = Bed::new("");
    let own = ubtrfs_fs::Caller { uid: OWNER, gid: OWNER, umask: 0 };
    bed.fs.create_subvolume(bed.id("/open"), b"own", &own).unwrap();
    let delete = subvolume::Request::Delete { dir: 0, name: b"own".to_vec() };
    bed.call(OWNER, Request::Subvolume(delete), &["/open"]).unwrap();
}

#[test]
fn refusals_say_why() {
    let bed = Bed::new("");
    let text = |uid, request: Request, files: &[&str]| bed.call(uid, request, files).unwrap_err().text;
    assert!(text(USER, delete(), &["/open"]).contains("user_subvol_rm_allowed"));
    let id = bed.id("/open/a").root;
    bed.fs.set_default_subvolume(id).unwrap();
    assert!(text(0, delete(), &["/open"]).contains("default subvolume"));
    bed.fs.set_default_subvolume(RootId::FS_TREE).unwrap();
    const IMMUTABLE: u32 = 0x10;
    bed.fs.set_inode_flags(bed.id("/open"), IMMUTABLE, &ROOT).unwrap();
    assert!(text(0, delete(), &["/open"]).contains("chattr"));
    assert!(text(0, create(), &[]).contains("lacks its file 0"));
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'n'; 256]] {
        let request =
            subvolume::Request::Create { dir: 0, name: name.to_vec(), umask: 0, qgroups: Vec::new(), limits: None };
        assert!(bed.call(0, Request::Subvolume(request), &["/closed"]).is_err(), "{name:?}");
    }
}
