//! Tests resuming a receive that broke off.

use super::*;

/// Receives the first `len` bytes of a stream. The receive fails, and leaves an incomplete subvolume.
fn stop_at(bed: &Bed, stream: &[u8], len: usize) {
    let options = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
    bed.receive_with(&stream[..len], &options).unwrap_err();
    assert!(bed.find("s").is_some(), "it was kept");
}

fn resume(bed: &Bed, stream: &[u8]) -> Result<ReceiveReport, ReceiveError> {
    bed.receive_with(stream, &ReceiveOptions { keep: true, ..ReceiveOptions::default() })
}

#[test]
fn a_capability_survives_a_break_before_the_owner_is_set() {
    let first = [
        StreamCommand::Mkfile { path: b"o257-7-0", ino: 257 },
        StreamCommand::SetXattr { path: b"o257-7-0", name: b"security.capability", data: &CAPABILITY },
        StreamCommand::Rename { path: b"o257-7-0", to: b"f" },
    ];
    let whole = full("s", &[&first[..], &[StreamCommand::Chown { path: b"f", uid: 0, gid: 5 }]].concat());
    // Cut the stream before `Chown`.
    let end = full("s", &first).len() - stream(StreamVersion::V2, &[StreamCommand::End]).len()
        + stream(StreamVersion::V2, &[]).len();
    let bed = Bed::new();
    stop_at(&bed, &whole, end);
    resume(&bed, &whole).unwrap();
    assert_eq!(bed.fs.getxattr(bed.find("s/f").unwrap().id, b"security.capability").unwrap(), CAPABILITY);
    bed.close();
}

#[test]
fn a_kept_subvolume_that_was_changed_is_not_resumed() {
    let commands = [
        StreamCommand::Mkdir { path: b"d", ino: 257 },
        StreamCommand::Mkfile { path: b"d/f", ino: 258 },
        StreamCommand::Write { path: b"d/f", offset: 0, data: b"content" },
        StreamCommand::Mkfile { path: b"d/g", ino: 259 },
    ];
    let whole = full("s", &commands);
    let id = |bed: &Bed, path: &str| bed.find(path).unwrap().id;
    type Change = fn(&Bed, &dyn Fn(&Bed, &str) -> InodeId);
    let changes: [(&str, Change); 4] = [
        ("content", |bed, id| assert_eq!(bed.fs.write(id(bed, "s/d/f"), 0, b"other").unwrap(), 5)),
        ("name", |bed, id| {
            let _ = bed.fs.create(id(bed, "s"), b"new", NewInode::file(0o644), &Caller::ROOT).unwrap();
        }),
        ("removal", |bed, id| bed.fs.unlink(id(bed, "s/d"), b"f").unwrap()),
        ("attribute", |bed, id| {
            bed.fs.setxattr(id(bed, "s/d"), b"user.x", b"1", XattrFlags::empty(), &Caller::ROOT).unwrap();
        }),
    ];
    for (what, change) in changes {
        let bed = Bed::new();
        stop_at(&bed, &whole, whole.len() - 20);
        change(&bed, &id);
        let error = resume(&bed, &whole).unwrap_err().to_string();
        assert!(error.contains("it was changed since"), "{what}: {error}");
        bed.close();
    }
    // A change of access times does not prevent resuming.
    let bed = Bed::new();
    stop_at(&bed, &whole, whole.len() - 20);
    let atime = Some(ubtrfs_fs::SetTime::At(Timespec { sec: 77, nsec: 0 }));
    let before = bed.find("s/d/f").unwrap();
    let set = ubtrfs_fs::SetAttr { atime, ctime: Some(before.ctime), ..ubtrfs_fs::SetAttr::default() };
    bed.fs.setattr(before.id, &set, &Caller::ROOT).unwrap();
    resume(&bed, &whole).unwrap();
    bed.close();
}
