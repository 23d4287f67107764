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

/// Receives the stream of `s`, and returns the images that a killed program would leave: after the commit that makes
/// the subvolume, if it makes one, and after a commit amid the changes.
fn leftovers(bed: &Bed, stream: &[u8]) -> Vec<Image> {
    struct Slow<'b> {
        bed: &'b Bed,
        rest: &'b [u8],
        left: Vec<Image>,
    }
    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            if self.rest.len() <= 60 && self.left.is_empty() {
                let is_marked = |made: Attr| self.bed.fs.getxattr(made.id, INCOMPLETE_XATTR.as_bytes()).is_ok();
                while !self.bed.find("s").is_some_and(is_marked) {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                self.bed.fs.sync().unwrap();
                self.left.push(Image::copy_of(self.bed.image.path()).unwrap());
            }
            let most = if self.rest.len() > 60 { self.rest.len() - 60 } else { self.rest.len() };
            let len = most.min(out.len());
            out[..len].copy_from_slice(&self.rest[..len]);
            self.rest = &self.rest[len..];
            Ok(len)
        }
    }
    let mut made = Vec::new();
    let mut input = Slow { bed, rest: stream, left: Vec::new() };
    let copy = &mut |_: &ubtrfs_fs::ReceivedSubvolume| made.push(Image::copy_of(bed.image.path()).unwrap());
    bed.fs.receive(TOP, &mut input, &ReceiveOptions::default(), &Job::new(), copy).unwrap();
    made.append(&mut input.left);
    made
}

#[test]
fn what_a_killed_receive_left_is_replaced_only_on_request_and_only_by_its_own_stream() {
    let replaces = ReceiveOptions { replaces: true, ..ReceiveOptions::default() };
    for is_snapshot in [false, true] {
        let bed = Bed::new();
        let (whole, other) = match is_snapshot {
            false => (full("s", &small_tree()), incremental_from(NEXT, "s", &[])),
            true => (incremental("s", &small_tree_renamed()), full("s", &small_tree())),
        };
        if is_snapshot {
            bed.receive(&full("s1", &small_tree())).unwrap();
        }
        bed.fs.sync().unwrap();
        let (mut nr_marked, mut nr_left) = (0, 0);
        for image in leftovers(&bed, &whole) {
            let bed = Bed { fs: Bed::open(&image), image };
            let Some(left) = bed.find("s") else { continue };
            nr_left += 1;
            let is_marked = bed.fs.getxattr(left.id, INCOMPLETE_XATTR.as_bytes()).is_ok();
            nr_marked += u32::from(is_marked);
            assert!(bed.fails(&whole).contains("it was interrupted"));
            assert!(bed.receive_with(&other, &replaces).is_err());
            assert_eq!(bed.find("s").unwrap().id, left.id);
            {
                // What somebody changed is not deleted.
                let image = Image::copy_of(bed.image.path()).unwrap();
                let changed = Bed { fs: Bed::open(&image), image };
                let mine = changed.fs.create(left.id, b"mine", NewInode::file(0o644), &Caller::ROOT).unwrap();
                let later = Timespec { sec: mine.ctime.sec + 120, ..mine.ctime };
                let set = ubtrfs_fs::SetAttr { ctime: Some(later), ..ubtrfs_fs::SetAttr::default() };
                changed.fs.setattr(mine.id, &set, &Caller::ROOT).unwrap();
                assert!(changed.receive_with(&whole, &replaces).is_err());
                assert!(changed.find("s/mine").is_some());
                changed.close();
            }
            bed.receive_with(&whole, &replaces).unwrap();
            assert_ne!(bed.find("s").unwrap().id, left.id);
            assert!(bed.subvolume("s").flags.contains(RootFlags::RDONLY));
            assert!(bed.receive_with(&whole, &replaces).unwrap_err().to_string().contains("exists already"));
            // A received subvolume that became writable is its user's.
            let id = bed.find("s").unwrap().id.root;
            bed.fs.set_subvolume_read_only(id, false).unwrap();
            assert!(bed.receive_with(&whole, &replaces).unwrap_err().to_string().contains("exists already"));
            bed.close();
        }
        eprintln!("{nr_left} left, {nr_marked} marked");
        assert!(nr_marked > 0, "the first commit may have the mark too, the second has it");
        bed.close();
    }
}

/// Changes of [`small_tree`].
fn small_tree_renamed() -> Vec<StreamCommand<'static>> {
    vec![
        StreamCommand::Rename { path: b"dir", to: b"renamed" },
        StreamCommand::Write { path: b"renamed/file", offset: 0, data: b"changed" },
        StreamCommand::Unlink { path: b"link" },
    ]
}
