//! Tests receiving streams made by hand: changes that a stream must not make, the state after a failure. Module
//! `resume` resumes broken receives.

mod resume;

use std::io::Read;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::{InodeFlags, RootFlags, Timespec};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{
    Attr, Caller, FileExtentKind, Fs, INCOMPLETE_XATTR, InodeId, Job, MountOptions, NewInode, ReceiveError,
    ReceiveOptions, ReceiveReport, RenameFlags, SubvolumeInfo, XattrFlags,
};
use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};
use ubtrfs_testkit::hostile::mend_checksums;
use ubtrfs_testkit::{CAPABILITY, Image, Rng, btrfs_check, capability, second_opinion};
use uuid::Uuid;

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const SENT: Uuid = Uuid::from_u128(0x11);
const NEXT: Uuid = Uuid::from_u128(0x22);

struct Bed {
    image: Image,
    fs: Arc<Fs>,
}

impl Bed {
    fn new() -> Self {
        let image = Image::empty(256 << 20).unwrap();
        let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
        ubtrfs_mkfs::make(&device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        drop(device);
        Self { fs: Self::open(&image), image }
    }

    fn open(image: &Image) -> Arc<Fs> {
        let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
        Fs::open(vec![device], MountOptions::default()).unwrap()
    }

    fn receive(&self, stream: &[u8]) -> Result<ReceiveReport, ReceiveError> {
        self.receive_with(stream, &ReceiveOptions::default())
    }

    fn receive_with(&self, stream: &[u8], options: &ReceiveOptions) -> Result<ReceiveReport, ReceiveError> {
        let options = ReceiveOptions { ended: Arc::default(), ..options.clone() };
        self.fs.receive(TOP, stream, &options, &Job::new(), &mut |_| {})
    }

    fn fails(&self, stream: &[u8]) -> String {
        self.receive(stream).unwrap_err().to_string()
    }

    fn find(&self, path: &str) -> Option<Attr> {
        self.fs.lookup_path(path.as_bytes(), false).ok()
    }

    fn content(&self, path: &str) -> Vec<u8> {
        self.fs.read(self.find(path).unwrap().id, 0, 1 << 20).unwrap()
    }

    fn subvolume(&self, path: &str) -> SubvolumeInfo {
        self.fs.subvolume_info(self.find(path).unwrap().id.root).unwrap()
    }

    fn names(&self, dir: InodeId) -> Vec<String> {
        self.raw_names(dir).iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
    }

    /// The names in a directory, as bytes: a received name need not be UTF-8.
    fn raw_names(&self, dir: InodeId) -> Vec<Vec<u8>> {
        let mut names = Vec::new();
        self.fs
            .readdir(dir, 0, &mut |entry| {
                names.push(entry.name.to_vec());
                true
            })
            .unwrap();
        names.retain(|name| name != b"." && name != b"..");
        names.sort();
        names
    }

    /// Closes the filesystem, and checks it.
    fn close(self) -> Image {
        self.fs.close().unwrap();
        match capability::program("btrfs") {
            true => btrfs_check(self.image.path()).unwrap(),
            false => second_opinion(self.image.path()).unwrap(),
        }
        self.image
    }
}

fn stream(version: StreamVersion, commands: &[StreamCommand<'_>]) -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), version).unwrap();
    for command in commands {
        writer.command(command).unwrap();
    }
    writer.into_inner()
}

/// Returns a stream that makes the subvolume `name`, then has `commands`, and ends with `End`.
fn full(name: &'static str, commands: &[StreamCommand<'_>]) -> Vec<u8> {
    let first = StreamCommand::Subvol { path: name.as_bytes(), uuid: SENT, ctransid: 7 };
    stream(StreamVersion::V2, &[&[first], commands, &[StreamCommand::End]].concat())
}

fn incremental(name: &'static str, commands: &[StreamCommand<'_>]) -> Vec<u8> {
    incremental_from(SENT, name, commands)
}

fn incremental_from(clone_uuid: Uuid, name: &'static str, commands: &[StreamCommand<'_>]) -> Vec<u8> {
    let path = name.as_bytes();
    let first = StreamCommand::Snapshot { path, uuid: NEXT, ctransid: 9, clone_uuid, clone_ctransid: 7 };
    stream(StreamVersion::V2, &[&[first], commands, &[StreamCommand::End]].concat())
}

fn small_tree() -> Vec<StreamCommand<'static>> {
    let time = |sec| Timespec { sec, nsec: 5 };
    vec![
        StreamCommand::Mkdir { path: b"o257-7-0", ino: 257 },
        StreamCommand::Rename { path: b"o257-7-0", to: b"dir" },
        StreamCommand::Mkfile { path: b"o258-7-0", ino: 258 },
        StreamCommand::Rename { path: b"o258-7-0", to: b"dir/file" },
        StreamCommand::Write { path: b"dir/file", offset: 0, data: b"content" },
        StreamCommand::Link { path: b"link", target: b"dir/file" },
        StreamCommand::Chown { path: b"dir/file", uid: 1000, gid: 1001 },
        StreamCommand::Chmod { path: b"dir/file", mode: 0o4755 },
        StreamCommand::SetXattr { path: b"dir/file", name: b"user.x", data: b"1" },
        StreamCommand::Symlink { path: b"out", ino: 259, target: b"/" },
        StreamCommand::Utimes {
            path: b"dir/file",
            atime: time(1),
            mtime: time(2),
            ctime: time(3),
            otime: Some(time(4)),
        },
        StreamCommand::Utimes { path: b"dir", atime: time(5), mtime: time(6), ctime: time(7), otime: None },
    ]
}

#[test]
fn a_subvolume_is_received_with_its_origin() {
    let bed = Bed::new();
    let report = bed.receive(&full("s1", &small_tree())).unwrap();
    assert_eq!(report.subvolumes.len(), 1);
    let file = bed.find("s1/dir/file").unwrap();
    assert_eq!((file.mode, file.uid, file.gid, file.nlink), (0o104_755, 1000, 1001, 2));
    assert_eq!((file.atime.sec, file.mtime.sec, file.otime.sec), (1, 2, 4));
    assert_eq!(bed.content("s1/link"), b"content");
    assert_eq!(bed.find("s1/dir").unwrap().mtime.sec, 6);
    let info = bed.subvolume("s1");
    assert_eq!((info.received_uuid, info.stransid.0), (SENT, 7));
    assert!(info.flags.contains(RootFlags::RDONLY) && info.rtransid.0 > 0 && info.rtime.sec > 0);
    assert_eq!(bed.fs.listxattr(InodeId::root_of(info.id)).unwrap(), Vec::<Vec<u8>>::new());

    bed.receive(&incremental("s2", &[StreamCommand::Unlink { path: b"link" }])).unwrap();
    let next = bed.subvolume("s2");
    assert_eq!((next.parent_uuid, next.received_uuid, next.stransid.0), (info.uuid, NEXT, 9));
    assert_eq!(bed.find("s2/dir/file").unwrap().nlink, 1);
    assert_eq!(bed.find("s1/dir/file").unwrap().nlink, 2);
    // The last subvolume still has its received UUID after the filesystem is closed and opened again.
    let image = bed.close();
    let bed = Bed { fs: Bed::open(&image), image };
    assert_eq!(bed.subvolume("s2").received_uuid, NEXT);
    bed.close();
}

#[test]
fn a_chain_of_snapshots_makes_one_commit_for_each() {
    const LAST: u64 = 20;
    let bed = Bed::new();
    let mut input = full("s0", &small_tree());
    for number in 1..=LAST {
        let path = format!("s{number}");
        let parent = if number == 1 { (SENT, 7) } else { (Uuid::from_u128(u128::from(number) + 99), 6 + number) };
        let (uuid, ctransid) = (Uuid::from_u128(u128::from(number) + 100), 7 + number);
        let (clone_uuid, clone_ctransid) = parent;
        let begin = StreamCommand::Snapshot { path: path.as_bytes(), uuid, ctransid, clone_uuid, clone_ctransid };
        let name = format!("new-{number}");
        input.extend(stream(
            StreamVersion::V2,
            &[begin, StreamCommand::Mkfile { path: name.as_bytes(), ino: 1000 }, StreamCommand::End],
        ));
    }
    let before = bed.fs.superblock().generation.0;
    assert_eq!(bed.receive(&input).unwrap().subvolumes.len() as u64, 1 + LAST);
    let nr_commits = bed.fs.superblock().generation.0 - before;
    assert!(nr_commits <= LAST + 3, "{nr_commits} commits");
    assert_eq!(bed.find(&format!("s{LAST}/new-1")).map(|file| file.nlink), Some(1));
    let sent = bed.subvolume(&format!("s{LAST}"));
    assert_eq!((sent.received_uuid, sent.stransid.0), (Uuid::from_u128(u128::from(LAST) + 100), 7 + LAST));
    assert!(sent.flags.contains(RootFlags::RDONLY));
    // All subvolumes are durable when `receive` returns: a sync has nothing left to commit.
    let nr_commits = bed.fs.superblock().generation;
    bed.fs.sync().unwrap();
    assert_eq!(bed.fs.superblock().generation, nr_commits);
    bed.close();
}

#[test]
fn no_path_leads_out_of_the_subvolume() {
    let bed = Bed::new();
    let outside = bed.fs.create(TOP, b"outside", NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
    bed.fs.create(outside, b"victim", NewInode::file(0o644), &Caller::ROOT).unwrap();
    bed.fs.create_subvolume(TOP, b"origin", &Caller::ROOT).unwrap();
    let before = (bed.names(TOP), bed.names(outside));
    let link = |target: &'static [u8]| StreamCommand::Symlink { path: b"link", ino: 300, target };
    let dir = StreamCommand::Mkdir { path: b"d", ino: 301 };
    for path in
        ["../outside/new", "/outside/new", "d/../../outside/new", "link/new", "d/./new", "link/victim", "..", ""]
    {
        let path = path.as_bytes();
        let attacks = [
            StreamCommand::Mkfile { path, ino: 1 },
            StreamCommand::Mkdir { path, ino: 1 },
            StreamCommand::Rename { path: b"d", to: path },
            StreamCommand::Rename { path, to: b"stolen" },
            StreamCommand::Link { path: b"stolen", target: path },
            StreamCommand::Link { path, target: b"file" },
            StreamCommand::Unlink { path },
            StreamCommand::Rmdir { path },
            StreamCommand::Write { path, offset: 0, data: b"attack" },
            StreamCommand::Truncate { path, size: 100 },
            StreamCommand::Fallocate { path, mode: 0, offset: 0, size: 4096 },
        ];
        for attack in attacks {
            for target in [&b"../outside"[..], b"/outside", b"..", b"."] {
                let file = StreamCommand::Mkfile { path: b"file", ino: 302 };
                let error = bed.fails(&full("s", &[dir.clone(), file, link(target), attack.clone()]));
                assert!(error.contains("command 5"), "{attack:?}: {error}");
                assert_eq!((bed.names(TOP), bed.names(outside)), before, "{attack:?}");
            }
        }
    }
    for name in ["../s", "/s", "", ".", "..", "outside/../s", "a\0b", "missing/s"] {
        assert!(bed.fails(&full(name, &[])).starts_with("command 1 (subvol)"), "{name:?}");
    }
    // If the last name of a path is a symbolic link, the command changes the link itself.
    bed.receive(&full("s", &[link(b"../outside/victim"), StreamCommand::Chown { path: b"link", uid: 5, gid: 5 }]))
        .unwrap();
    assert_eq!(bed.find("outside/victim").unwrap().uid, 0);
    bed.close();
}

#[test]
fn a_stream_does_not_enter_nested_subvolumes() {
    let bed = Bed::new();
    bed.receive(&full("s1", &[])).unwrap();
    let origin = bed.subvolume("s1");
    bed.fs.set_subvolume_read_only(origin.id, false).unwrap();
    let nested = bed.fs.create_subvolume(InodeId::root_of(origin.id), b"nested", &Caller::ROOT).unwrap();
    bed.fs.set_subvolume_read_only(origin.id, true).unwrap();
    for attack in [
        StreamCommand::Mkfile { path: b"nested/file", ino: 1 },
        StreamCommand::Chmod { path: b"nested", mode: 0o777 },
        StreamCommand::Rename { path: b"nested", to: b"moved" },
        StreamCommand::Rmdir { path: b"nested" },
        StreamCommand::Clone {
            offset: 0,
            len: 4096,
            path: b"nested/x",
            clone_uuid: origin.uuid,
            clone_ctransid: 7,
            clone_path: b"nested/y",
            clone_offset: 0,
        },
    ] {
        // Making the origin writable cleared the origin's received UUID, so the stream refers to the origin by the
        // origin's own UUID.
        let error = bed.fails(&incremental_from(origin.uuid, "s2", std::slice::from_ref(&attack)));
        assert!(error.contains("'nested' is another subvolume"), "{attack:?}: {error}");
    }
    assert_eq!(bed.names(nested), [""; 0]);
    bed.close();
}

#[test]
fn a_broken_stream_leaves_nothing() {
    let bed = Bed::new();
    let whole = full("s1", &small_tree());
    for len in (0..whole.len()).step_by(7) {
        bed.receive(&whole[..len]).unwrap_err();
        assert_eq!(bed.names(TOP), [""; 0], "{len} bytes");
    }
    for at in (18..whole.len()).step_by(11) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        assert!(bed.receive(&damaged).is_err());
        assert_eq!(bed.names(TOP), [""; 0], "byte {at}");
    }
    assert!(bed.fails(&whole[..whole.len() - 10]).contains("without an end command"));
    assert!(bed.fails(b"").contains("empty"));
    assert!(bed.fails(b"not a stream at all").contains("not a send stream"));
    bed.receive(&whole).unwrap();
    bed.close();
}

#[test]
fn a_stream_that_does_not_fit_names_its_command_and_leaves_nothing() {
    let bed = Bed::new();
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at ^ at >> 9) as u8).collect();
    let write = |number: u64| StreamCommand::Write { path: b"f", offset: number << 20, data: &data };
    let writes: Vec<StreamCommand<'_>> = (0..300).map(write).collect();
    let stream = full("s1", &[&[StreamCommand::Mkfile { path: b"f", ino: 300 }], &writes[..]].concat());
    let error = bed.fails(&stream);
    assert!(error.starts_with("command ") && error.contains("(write) at byte") && error.contains("space"), "{error}");
    assert_eq!(bed.names(TOP), [""; 0]);
    bed.fs.sync().unwrap();
    bed.receive(&full("s2", &small_tree())).unwrap();
    bed.close();
}

#[test]
fn a_kept_subvolume_is_marked_and_resumed_at_every_command() {
    let bed = Bed::new();
    bed.receive(&full("s1", &small_tree())).unwrap();
    let changes = [
        StreamCommand::Rename { path: b"dir", to: b"renamed" },
        StreamCommand::Write { path: b"renamed/file", offset: 100_000, data: b"more" },
        StreamCommand::Unlink { path: b"link" },
        StreamCommand::Mkfile { path: b"new", ino: 400 },
        StreamCommand::Truncate { path: b"new", size: 5 },
    ];
    let whole = incremental("s2", &changes);
    let keep = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
    let mut nr_kept = 0;
    for len in 0..whole.len() {
        bed.receive_with(&whole[..len], &keep).unwrap_err();
        let Some(kept) = bed.find("s2") else { continue };
        nr_kept += 1;
        let info = bed.subvolume("s2");
        assert!(info.received_uuid.is_nil() && !info.flags.contains(RootFlags::RDONLY), "it does not look received");
        assert_eq!(info.stransid.0, 9);
        let mark = bed.fs.getxattr(kept.id, INCOMPLETE_XATTR.as_bytes()).unwrap();
        assert!(mark.starts_with(b"stopped commands="), "{}", mark.escape_ascii());
        if nr_kept % 10 != 0 {
            // Keep the incomplete subvolume: the next, longer prefix of the stream resumes this receive.
            continue;
        }
        assert!(bed.fails(&whole).contains("continue it with receive --keep"));
        // A stream with other commands for the same subvolume is refused, unless no command was applied yet.
        if !mark.starts_with(b"stopped commands=0 ") {
            let other = bed.receive_with(&incremental("s2", &changes[1..]), &keep).unwrap_err().to_string();
            assert!(other.contains("other commands than the one that began it"), "{other}");
        }
        let report = bed.receive_with(&whole, &keep).unwrap();
        assert_eq!(report.subvolumes[0].nr_resumed + report.nr_commands, changes.len() as u64);
        assert_eq!(bed.content("s2/renamed/file").len(), 100_004);
        assert_eq!(bed.find("s2/new").unwrap().size, 5);
        assert_eq!(bed.subvolume("s2").received_uuid, NEXT);
        assert!(bed.fs.getxattr(kept.id, INCOMPLETE_XATTR.as_bytes()).is_err());
        bed.fs.delete_subvolume(TOP, b"s2", None).unwrap();
    }
    assert!(nr_kept > 100);
    bed.close();
}

#[test]
fn names_that_are_taken_stay_as_they_are() {
    let bed = Bed::new();
    bed.receive(&full("s1", &small_tree())).unwrap();
    bed.fs.create(TOP, b"file", NewInode::file(0o644), &Caller::ROOT).unwrap();
    bed.fs.create_subvolume(TOP, b"mine", &Caller::ROOT).unwrap();
    for name in ["s1", "file", "mine"] {
        for keep in [false, true] {
            let options = ReceiveOptions { keep, ..ReceiveOptions::default() };
            let error = bed.receive_with(&full(name, &[]), &options).unwrap_err().to_string();
            assert!(error.ends_with("exists already"), "{error}");
        }
    }
    assert_eq!(bed.content("s1/link"), b"content");
    bed.close();
}

#[test]
fn a_name_that_the_same_input_received_is_not_called_interrupted() {
    let bed = Bed::new();
    let twice = [full("s", &small_tree()), full("s", &small_tree())].concat();
    let error = bed.fails(&twice);
    assert!(error.contains("'s' exists already"), "{error}");
    assert_eq!(bed.subvolume("s").received_uuid, SENT);
    bed.close();
}

#[test]
fn errors_name_the_missing_subvolume_or_feature() {
    let bed = Bed::new();
    let error = bed.fails(&incremental("s2", &[]));
    assert!(error.contains("the parent subvolume is not here") && error.contains(&SENT.to_string()), "{error}");
    let clone = StreamCommand::Clone {
        offset: 0,
        len: 4096,
        path: b"f",
        clone_uuid: NEXT,
        clone_ctransid: 3,
        clone_path: b"g",
        clone_offset: 0,
    };
    let error = bed.fails(&full("s1", &[StreamCommand::Mkfile { path: b"f", ino: 300 }, clone]));
    assert!(error.starts_with("command 3 (clone) at byte ") && error.contains("clone source is not here"), "{error}");
    assert!(
        bed.fails(&stream(StreamVersion::V1, &[StreamCommand::Unlink { path: b"x" }]))
            .contains("does not begin with a subvolume")
    );
    assert_eq!(bed.names(TOP), [""; 0]);
    bed.close();
}

#[test]
fn files_with_verity_are_received_without_it_and_counted() {
    let bed = Bed::new();
    let verity = |path| StreamCommand::EnableVerity { path, algorithm: 1, block_size: 4096, salt: b"", signature: b"" };
    let commands = |path| {
        let first = StreamCommand::Subvol { path: b"s1", uuid: SENT, ctransid: 7 };
        let data = StreamCommand::Write { path: b"f", offset: 0, data: b"data" };
        stream(
            StreamVersion::V3,
            &[first, StreamCommand::Mkfile { path: b"f", ino: 300 }, data, verity(path), StreamCommand::End],
        )
    };
    let error = bed.fails(&commands(b"g"));
    assert!(error.starts_with("command 4 (enable_verity) at byte "), "{error}");
    let report = bed.receive(&commands(b"f")).unwrap();
    assert_eq!(report.nr_without_verity, 1);
    assert_eq!(bed.subvolume("s1").received_uuid, SENT);
    bed.close();
}

#[test]
fn failed_commands_are_counted_and_passed_over() {
    let bed = Bed::new();
    let wrong = StreamCommand::Unlink { path: b"missing" };
    let stream = full("s1", &[std::slice::from_ref(&wrong), &small_tree(), std::slice::from_ref(&wrong)].concat());
    bed.receive(&stream).unwrap_err();
    let two = ReceiveOptions { max_errors: 2, ..ReceiveOptions::default() };
    bed.receive_with(&stream, &two).unwrap_err();
    let three = ReceiveOptions { max_errors: 3, ..ReceiveOptions::default() };
    let report = bed.receive_with(&stream, &three).unwrap();
    assert_eq!((report.nr_errors, report.errors.len()), (2, 2));
    assert_eq!(bed.content("s1/dir/file"), b"content");
    bed.close();
}

#[test]
fn new_inodes_take_nothing_from_their_directory() {
    let bed = Bed::new();
    let acl = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\xe8\x03\0\0\x04\0\x05\0\xff\xff\xff\xff\x10\0\x07\0\xff\xff\xff\xff\x20\0\x05\0\xff\xff\xff\xff";
    let commands = [
        StreamCommand::Mkdir { path: b"dir", ino: 300 },
        StreamCommand::Chown { path: b"dir", uid: 0, gid: 77 },
        StreamCommand::Chmod { path: b"dir", mode: 0o2755 },
        StreamCommand::SetXattr { path: b"dir", name: b"system.posix_acl_default", data: acl },
        StreamCommand::SetXattr { path: b"dir", name: b"btrfs.compression", data: b"zlib" },
        StreamCommand::Mkfile { path: b"dir/file", ino: 301 },
        StreamCommand::Mkdir { path: b"dir/sub", ino: 302 },
    ];
    bed.receive(&full("s1", &commands)).unwrap();
    for (path, mode) in [("s1/dir/file", 0o100_600), ("s1/dir/sub", 0o040_700)] {
        let found = bed.find(path).unwrap();
        assert_eq!((found.mode, found.gid, found.flags), (mode, 0, 0), "{path}");
        assert_eq!(bed.fs.listxattr(found.id).unwrap(), Vec::<Vec<u8>>::new(), "{path}");
    }
    bed.close();
}

#[test]
fn a_capability_outlives_the_chown_that_follows() {
    let bed = Bed::new();
    let data = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let commands = [
        StreamCommand::Mkfile { path: b"file", ino: 300 },
        StreamCommand::SetXattr { path: b"file", name: b"security.capability", data },
        StreamCommand::Rename { path: b"file", to: b"tool" },
        StreamCommand::Chown { path: b"tool", uid: 1, gid: 1 },
    ];
    bed.receive(&full("s1", &commands)).unwrap();
    assert_eq!(bed.fs.getxattr(bed.find("s1/tool").unwrap().id, b"security.capability").unwrap(), data);
    bed.close();
}

#[test]
fn encoded_data_is_verified_and_stored_as_it_is() {
    let bed = Bed::new();
    let plain: Vec<u8> = (0..131_072_u32).map(|at| (at / 1000) as u8).collect();
    let packed = zstd_safe_compress(&plain);
    let write = |data, offset, len, skip| StreamCommand::EncodedWrite {
        path: b"file",
        offset,
        unencoded_file_len: len,
        unencoded_len: 131_072,
        unencoded_offset: skip,
        compression: Some(2),
        encryption: None,
        data,
    };
    let file = StreamCommand::Mkfile { path: b"file", ino: 300 };
    let commands = [
        file.clone(),
        write(&packed, 0, 131_072, 0),
        // Write a part of an extent; then a part at an unaligned offset, which must be decompressed; then the end of
        // the file.
        write(&packed, 131_072, 8192, 4096),
        write(&packed, 139_264 + 100, 5000, 12_288),
        write(&packed, 262_144, 5000, 0),
    ];
    let report = bed.receive(&full("s1", &commands)).unwrap();
    assert_eq!(report.nr_stored_encoded, 3);
    let mut expected = vec![0; 267_144];
    expected[..131_072].copy_from_slice(&plain);
    expected[131_072..139_264].copy_from_slice(&plain[4096..12_288]);
    expected[139_364..144_364].copy_from_slice(&plain[12_288..17_288]);
    expected[262_144..].copy_from_slice(&plain[..5000]);
    assert!(bed.content("s1/file") == expected);
    let id = bed.find("s1/file").unwrap().id;
    let extents = bed.fs.extents(id).unwrap();
    let compressed = extents.iter().filter(|extent| extent.compression != Default::default());
    assert_eq!(compressed.filter(|extent| extent.kind == FileExtentKind::Data).count(), 3);

    let options = ReceiveOptions { force_decompress: true, ..ReceiveOptions::default() };
    let again = full("s2", &commands);
    assert_eq!(bed.receive_with(&again, &options).unwrap().nr_stored_encoded, 0);
    assert!(bed.content("s2/file") == expected);

    // Commands with wrong lengths or damaged data are refused.
    let mut damaged = packed.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0xff;
    for (what, lie) in [
        ("damaged", write(&damaged, 0, 131_072, 0)),
        ("not compressed at all", write(&plain[..4096], 0, 131_072, 0)),
        ("longer than its data", write(&packed, 0, 131_072, 4096)),
        ("overflowing", write(&packed, 0, u64::MAX, 4096)),
        ("past the largest file", write(&packed, u64::MAX - 4095, 131_072, 0)),
    ] {
        assert!(bed.receive(&full("bad", &[file.clone(), lie])).is_err(), "{what}");
        assert!(bed.find("bad").is_none());
    }
    bed.close();
}

fn zstd_safe_compress(data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 200_000];
    let len = zstd_safe::compress(&mut out[..], data, 3).unwrap();
    out.truncate(len);
    out
}

#[test]
fn a_parent_that_changed_is_refused() {
    let bed = Bed::new();
    bed.receive(&full("s1", &small_tree())).unwrap();
    let id = bed.subvolume("s1").id;
    bed.fs.set_subvolume_read_only(id, false).unwrap();
    bed.fs.create(InodeId::root_of(id), b"new", NewInode::file(0o600), &Caller::ROOT).unwrap();
    bed.fs.sync().unwrap();
    let error = bed.fails(&incremental("s2", &[]));
    assert!(error.contains("the parent subvolume is not here"), "{error}");
    let own = bed.subvolume("s1").uuid;
    let error = bed.fails(&incremental_from(own, "s2", &[]));
    assert!(error.contains("is writable"), "{error}");
    bed.close();
}

#[test]
fn a_cancelled_receive_ends_soon_and_leaves_nothing() {
    /// An input that returns the bytes, then waits until the flag is set, and only then ends.
    struct Slow(Vec<u8>, Arc<std::sync::atomic::AtomicBool>);
    impl Read for Slow {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            while self.0.is_empty() {
                if self.1.load(std::sync::atomic::Ordering::SeqCst) {
                    return Ok(0);
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let len = out.len().min(self.0.len());
            out[..len].copy_from_slice(&self.0[..len]);
            self.0.drain(..len);
            Ok(len)
        }
    }
    let bed = Bed::new();
    let mut begin = full("s1", &small_tree());
    begin.truncate(begin.len() - 10);
    let options = ReceiveOptions::default();
    let job = Job::new();
    std::thread::scope(|scope| {
        let input = Slow(begin, Arc::clone(&options.ended));
        let receiving = scope.spawn(|| bed.fs.receive(TOP, input, &options, &job, &mut |_| {}));
        std::thread::sleep(std::time::Duration::from_millis(100));
        job.cancel();
        assert!(receiving.join().unwrap().unwrap_err().is_cancelled());
    });
    assert_eq!(bed.names(TOP), [""; 0]);
    bed.close();
}

#[test]
fn mutated_streams_harm_nothing() {
    let bed = Bed::new();
    let outside = bed.fs.create(TOP, b"outside", NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
    let file = bed.fs.create(outside, b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    bed.fs.write(file, 0, b"untouched").unwrap();
    bed.fs.setxattr(file, b"user.x", b"1", XattrFlags::empty(), &Caller::ROOT).unwrap();
    bed.fs.sync().unwrap();
    let before = bed.fs.getattr(file).unwrap();
    bed.receive(&full("s1", &small_tree())).unwrap();
    let packed = zstd_safe_compress(&[7; 131_072]);
    let mut commands = small_tree();
    commands.extend([
        StreamCommand::Fallocate { path: b"dir/file", mode: 3, offset: 0, size: 4096 },
        StreamCommand::Fallocate { path: b"dir/file", mode: 1, offset: 1 << 20, size: 65_536 },
        StreamCommand::Clone {
            offset: 8192,
            len: 4096,
            path: b"link",
            clone_uuid: SENT,
            clone_ctransid: 7,
            clone_path: b"link",
            clone_offset: 0,
        },
        StreamCommand::Truncate { path: b"link", size: 1 << 20 },
        StreamCommand::EncodedWrite {
            path: b"link",
            offset: 0,
            unencoded_file_len: 131_072,
            unencoded_len: 131_072,
            unencoded_offset: 0,
            compression: Some(2),
            encryption: Some(0),
            data: &packed,
        },
        StreamCommand::Fileattr { path: b"link", attr: 0x3ff },
        StreamCommand::Unlink { path: b"link" },
        StreamCommand::Rename { path: b"dir", to: b"other" },
    ]);
    let good = [full("s2", &commands), incremental("s3", &commands)];
    let seed = Rng::seed_or(17);
    println!("UBTRFS_SEED={seed}");
    let mut rng = Rng::new(seed);
    for round in 0..600 {
        let mut stream = rng.pick(&good).clone();
        for _ in 0..1 + rng.below(4) {
            let at = 17 + rng.index(stream.len() - 17);
            match rng.below(4) {
                0 => stream[at] = rng.next_u64() as u8,
                1 => stream[at] ^= 1 << rng.below(8),
                2 => stream[at] = *rng.pick(b"/.s\0"),
                _ => {
                    let from = 17 + rng.index(stream.len() - 17);
                    let len = rng.index(12).min(stream.len() - at.max(from));
                    stream.copy_within(from..from + len, at);
                }
            }
        }
        mend_checksums(&mut stream);
        let max_errors = rng.below(3) * 5;
        let options = ReceiveOptions { max_errors, keep: rng.one_in(4), ..ReceiveOptions::default() };
        let _ = bed.receive_with(&stream, &options);
        assert!(bed.fs.read_only().is_none(), "round {round}: {:?}", bed.fs.read_only());
        assert_eq!(bed.fs.getattr(file).unwrap(), before, "round {round}");
        assert_eq!(bed.names(outside), ["file"]);
        for name in bed.raw_names(TOP) {
            if name != b"outside" && name != b"s1" {
                bed.fs.delete_subvolume(TOP, &name, None).unwrap();
            }
        }
    }
    assert_eq!(bed.content("s1/dir/file"), b"content");
    bed.fs.finish_deletions(&mut |_| Ok(())).unwrap();
    bed.close();
}

#[test]
fn a_subvolume_that_is_moved_or_deleted_meanwhile_is_no_success_and_does_not_stay() {
    let bed = Bed::new();
    let options = ReceiveOptions::default();
    let commands = [StreamCommand::Mkfile { path: b"file", ino: 257 }, StreamCommand::Unlink { path: b"missing" }];
    let moved = bed.fs.receive(TOP, &full("s", &commands)[..], &options, &Job::new(), &mut |made| {
        bed.fs.rename(made.dir, b"s", TOP, b"moved", RenameFlags::empty()).unwrap();
    });
    assert!(moved.is_err());
    assert_eq!(bed.names(TOP), [""; 0]);
    let options = ReceiveOptions { ended: Arc::default(), ..options };
    let deleted = bed.fs.receive(TOP, &full("s", &commands[..1])[..], &options, &Job::new(), &mut |made| {
        bed.fs.delete_subvolume(made.dir, b"s", Some(made.id)).unwrap();
    });
    assert!(deleted.is_err(), "{deleted:?}");
    assert_eq!(bed.names(TOP), [""; 0]);
    bed.close();
}

#[test]
fn flags_do_not_change_the_method_of_compression() {
    let bed = Bed::new();
    let commands = [
        StreamCommand::Mkfile { path: b"f", ino: 257 },
        StreamCommand::SetXattr { path: b"f", name: b"btrfs.compression", data: b"zstd" },
        StreamCommand::Fileattr { path: b"f", attr: InodeFlags::NOATIME.bits() | InodeFlags::COMPRESS.bits() },
    ];
    bed.receive(&full("s", &commands)).unwrap();
    let file = bed.find("s/f").unwrap();
    assert_eq!(bed.fs.getxattr(file.id, b"btrfs.compression").unwrap(), b"zstd");
    assert_eq!(file.flags, (InodeFlags::NOATIME | InodeFlags::COMPRESS).bits());
    bed.close();
}

#[test]
fn a_name_that_is_being_received_is_not_called_interrupted() {
    /// An input that runs two further receives of its stream before it returns the stream's last 30 bytes.
    struct Slow<'b> {
        bed: &'b Bed,
        stream: &'b [u8],
        rest: &'b [u8],
    }
    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            if self.rest.len() == 30 {
                while self.bed.find("s").is_none() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                for keep in [false, true] {
                    let options = ReceiveOptions { keep, ..ReceiveOptions::default() };
                    let error = self.bed.receive_with(self.stream, &options).unwrap_err().to_string();
                    assert!(error.contains("'s' is being received by another command"), "{error}");
                }
            }
            let most = if self.rest.len() > 30 { self.rest.len() - 30 } else { self.rest.len() };
            let len = most.min(out.len());
            out[..len].copy_from_slice(&self.rest[..len]);
            self.rest = &self.rest[len..];
            Ok(len)
        }
    }
    let whole = full("s", &small_tree());
    let bed = Bed::new();
    let input = Slow { bed: &bed, stream: &whole, rest: &whole };
    bed.fs.receive(TOP, input, &ReceiveOptions::default(), &Job::new(), &mut |_| {}).unwrap();
    assert!(bed.fails(&whole).contains("exists already"));
    bed.close();
}

#[test]
fn cloning_inline_data_changes_no_times_of_its_source() {
    let bed = Bed::new();
    let clone = StreamCommand::Clone {
        offset: 0,
        len: 7,
        path: b"copy",
        clone_uuid: SENT,
        clone_ctransid: 7,
        clone_path: b"dir/file",
        clone_offset: 0,
    };
    let commands = [small_tree(), vec![StreamCommand::Mkfile { path: b"copy", ino: 260 }, clone]].concat();
    bed.receive(&full("s1", &commands)).unwrap();
    assert_eq!(bed.content("s1/copy"), b"content");
    let file = bed.find("s1/dir/file").unwrap();
    assert_eq!((file.atime.sec, file.mtime.sec), (1, 2));
    bed.close();
}
