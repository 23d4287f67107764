//! Tests calls that must fail or wait while a subvolume is being sent, and sends that must fail. Linux judges the
//! streams themselves in `testkit/tests/it/send.rs`.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use rustix::io::Errno;
use ubtrfs_device::Device;
use ubtrfs_format::{DevId, RootId};
use ubtrfs_fs::{
    Caller, Error, FallocateMode, FileExtentInfo, FileExtentKind, Fs, InodeId, Job, MountOptions, NewInode,
    ReceiveOptions, SendRequest, SetAttr,
};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice};

fn filesystem() -> Arc<Fs> {
    let fs = empty();
    fs.create_subvolume(fs.root(), b"live", &Caller::ROOT).unwrap();
    let live = root(&fs, "live");
    for name in 0..50 {
        let file = fs
            .create(InodeId::root_of(live), format!("{name}").as_bytes(), NewInode::file(0o644), &Caller::ROOT)
            .unwrap();
        fs.write(file.id, 0, &vec![1; 100_000]).unwrap();
    }
    fs
}

/// An empty filesystem.
fn empty() -> Arc<Fs> {
    let medium = Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap();
    Fs::open(vec![Arc::new(MediumDevice::new(medium)) as Arc<dyn Device>], MountOptions::default()).unwrap()
}

fn root(fs: &Fs, name: &str) -> RootId {
    fs.subvolumes().unwrap().into_iter().find(|info| info.path == name.as_bytes()).unwrap().id
}

fn snapshot(fs: &Fs, name: &str) -> RootId {
    fs.snapshot_in(root(fs, "live"), fs.root(), name.as_bytes(), true, &[]).unwrap();
    root(fs, name)
}

fn request(subvolume: RootId, parent: Option<RootId>, clone_sources: Vec<RootId>) -> SendRequest {
    SendRequest {
        subvolumes: vec![subvolume],
        parent,
        clone_sources,
        version: 1,
        compressed_data: false,
        no_data: false,
        joined: false,
    }
}

/// An output that calls a function at its first write.
struct AtWrite<F>(Option<F>);

impl<F: FnOnce() + Send> Write for AtWrite<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(call) = self.0.take() {
            call();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_subvolume_that_is_sent_stays_and_stays_read_only() {
    let fs = filesystem();
    let (old, new) = (snapshot(&fs, "s0"), snapshot(&fs, "s1"));
    let busy = |done: Result<(), Error>| matches!(done, Err(Error::InProgress(_)));
    let mut output = AtWrite(Some(|| {
        for (id, name) in [(old, &b"s0"[..]), (new, b"s1")] {
            assert!(busy(fs.delete_subvolume(fs.root(), name, None)));
            assert!(busy(fs.set_subvolume_read_only(id, false)));
        }
        // Other calls, such as a snapshot and a sync, work during the send.
        snapshot(&fs, "s2");
        fs.sync().unwrap();
    }));
    fs.send(&request(new, Some(old), vec![]), &mut output, &Job::new()).unwrap();
    assert!(output.0.is_none(), "it was asked");
    fs.set_subvolume_read_only(new, false).unwrap();
    fs.delete_subvolume(fs.root(), b"s0", None).unwrap();
}

#[test]
fn a_balance_waits_for_a_send_and_can_be_cancelled_meanwhile() {
    let fs = filesystem();
    let id = snapshot(&fs, "s0");
    let group = fs.block_groups().first().unwrap().start;
    let (waits, cancelled) = (Job::new(), Job::new());
    std::thread::scope(|scope| {
        let mut moves = Vec::new();
        let mut output = AtWrite(Some(|| {
            for job in [&waits, &cancelled] {
                let fs = &fs;
                moves.push(scope.spawn(move || fs.relocate_block_group(group, job).map(drop)));
                while job.progress().step.is_empty() {
                    std::thread::yield_now();
                }
            }
            cancelled.cancel();
            let errno = moves.pop().unwrap().join().unwrap().unwrap_err().errno();
            assert_eq!(errno, Errno::CANCELED.raw_os_error());
            // A second send starts although a relocation waits for the first send.
            fs.send(&request(id, None, vec![]), &mut io::sink(), &Job::new()).unwrap();
            assert!(!moves[0].is_finished());
        }));
        fs.send(&request(id, None, vec![]), &mut output, &Job::new()).unwrap();
        moves.pop().unwrap().join().unwrap().unwrap();
    });
    assert!(fs.block_groups().iter().all(|other| other.start != group), "it moved");
    fs.send(&request(id, None, vec![]), &mut io::sink(), &Job::new()).unwrap();
}

#[test]
fn a_deduplication_into_a_snapshot_waits_for_a_send() {
    let fs = filesystem();
    let id = snapshot(&fs, "s0");
    let file = |root: RootId, name: &str| fs.lookup(InodeId::root_of(root), name.as_bytes()).unwrap().id;
    let source = file(root(&fs, "live"), "0");
    let equal = file(root(&fs, "live"), "1");
    let target = file(id, "1");
    let address = |id: InodeId| fs.extents(id).unwrap().first().unwrap().disk_bytenr;
    fs.write(equal, 0, &[2]).unwrap();
    let before = fs.getattr(target).unwrap();
    let job = Job::new();
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        let mut output = AtWrite(Some(|| {
            let (fs, job) = (&fs, &job);
            running.push(scope.spawn(move || fs.dedupe_range(source, 0, target, 0, 0, job).unwrap()));
            while job.progress().step.is_empty() {
                std::thread::yield_now();
            }
        }));
        fs.send(&request(id, None, vec![]), &mut output, &Job::new()).unwrap();
        assert!(running.pop().unwrap().join().unwrap(), "the contents are equal");
    });
    assert_eq!(address(target), address(source));
    assert_eq!(fs.getattr(target).unwrap(), before, "times and content stay");
    assert!(!fs.dedupe_range(equal, 0, target, 0, 0, &Job::new()).unwrap());
    fs.send(&request(id, None, vec![]), &mut io::sink(), &Job::new()).unwrap();
    fs.close().unwrap();
}

#[test]
fn a_resize_that_moves_no_extents_does_not_wait_for_a_send() {
    let fs = filesystem();
    let id = snapshot(&fs, "s0");
    let (now, _) = fs.device_size(DevId(1)).unwrap();
    // The resizes get a cancelled job, so a resize that waited for the send would fail.
    let cancelled = Job::new();
    cancelled.cancel();
    let mut output = AtWrite(Some(|| {
        for len_bytes in [now, now - (64 << 20), now] {
            fs.resize_device(DevId(1), len_bytes, &cancelled).unwrap();
        }
        let refused = fs.resize_device(DevId(1), 2 * now, &cancelled).unwrap_err();
        assert_eq!(refused.errno(), Errno::INVAL.raw_os_error(), "{refused}");
    }));
    fs.send(&request(id, None, vec![]), &mut output, &Job::new()).unwrap();
    assert!(output.0.is_none(), "it was asked");
}

#[test]
fn a_send_refuses_invalid_requests() {
    let fs = filesystem();
    let (live, one) = (root(&fs, "live"), snapshot(&fs, "s0"));
    let send = |request: &SendRequest| fs.send(request, &mut io::sink(), &Job::new());
    assert!(matches!(send(&request(live, None, vec![])), Err(Error::NotPermitted(_))));
    assert!(matches!(send(&request(one, Some(live), vec![])), Err(Error::NotPermitted(_))));
    assert!(matches!(send(&request(one, None, vec![live])), Err(Error::NotPermitted(_) | Error::NoParent(_))));
    assert!(matches!(send(&request(one, None, vec![one])), Err(Error::NoParent(_))));
    assert!(matches!(send(&request(RootId(9999), None, vec![])), Err(Error::NotFound)));
    let version = SendRequest { version: 3, ..request(one, None, vec![]) };
    assert!(matches!(send(&version), Err(Error::InvalidArgument(_))));
    let compressed = SendRequest { compressed_data: true, ..request(one, None, vec![]) };
    assert!(matches!(send(&compressed), Err(Error::InvalidArgument(_))));
    let cancelled = Job::new();
    cancelled.cancel();
    let done = fs.send(&request(one, None, vec![]), &mut io::sink(), &cancelled);
    assert_eq!(done.unwrap_err().errno(), Errno::CANCELED.raw_os_error());
    send(&request(one, None, vec![])).unwrap();
}

#[test]
fn an_output_that_fails_ends_the_send_with_its_error() {
    struct Full(u64);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let fs = filesystem();
    let one = snapshot(&fs, "s0");
    for writes in 0..8 {
        let done = fs.send(&request(one, None, vec![]), &mut Full(writes), &Job::new());
        assert!(matches!(done, Err(Error::Output(ref error)) if error.kind() == io::ErrorKind::BrokenPipe), "{done:?}");
    }
    fs.delete_subvolume(fs.root(), b"s0", None).unwrap();
}

/// The names and contents at the top of a subvolume.
fn files(fs: &Fs, subvolume: &str) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let dir = InodeId::root_of(root(fs, subvolume));
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        names.push(entry.name.to_vec());
        true
    })
    .unwrap();
    names.retain(|name| name != b"." && name != b"..");
    let read = |name: &[u8]| fs.read(fs.lookup(dir, name).unwrap().id, 0, usize::MAX).unwrap();
    names.into_iter().map(|name| (name.clone(), read(&name))).collect()
}

/// Sends a subvolume to a filesystem.
fn send_to(receiver: &Fs, fs: &Fs, request: &SendRequest) {
    let mut stream = Vec::new();
    fs.send(request, &mut stream, &Job::new()).unwrap();
    receiver.receive(receiver.root(), &stream[..], &ReceiveOptions::default(), &Job::new(), &mut |_| {}).unwrap();
}

/// The deletion of files without names from a new snapshot is not committed yet when the snapshot is sent. A commit
/// during the send would change the snapshot.
#[test]
fn a_new_snapshot_with_files_without_names_stays_the_same_while_it_is_sent() {
    let fs = filesystem();
    let live = InodeId::root_of(root(&fs, "live"));
    let file = fs.lookup(live, b"0").unwrap().id;
    fs.open_inode(file).unwrap();
    fs.unlink(live, b"0").unwrap();
    let snapshot = snapshot(&fs, "snapshot");
    let mut output = AtWrite(Some(|| fs.sync().unwrap()));
    fs.send(&request(snapshot, None, vec![]), &mut output, &Job::new()).unwrap();
    fs.release_inode(file);
}

#[test]
fn a_filesystem_that_became_read_only_is_sent() {
    let (fs, receiver) = (filesystem(), empty());
    let snapshot = snapshot(&fs, "snapshot");
    fs.abort("a test".to_owned());
    send_to(&receiver, &fs, &request(snapshot, None, vec![]));
    assert_eq!(files(&receiver, "snapshot"), files(&fs, "snapshot"));
}

/// The filesystem becomes read-only before files without names are deleted from a new snapshot.
#[test]
fn a_file_without_a_name_is_not_sent() {
    let (fs, full, changes) = (filesystem(), empty(), empty());
    let live = InodeId::root_of(root(&fs, "live"));
    let old = snapshot(&fs, "old");
    let file = fs.lookup(live, b"0").unwrap().id;
    fs.open_inode(file).unwrap();
    fs.unlink(live, b"0").unwrap();
    fs.write(file, 0, b"no name").unwrap();
    let new = snapshot(&fs, "new");
    fs.abort("a test".to_owned());
    send_to(&full, &fs, &request(new, None, vec![]));
    send_to(&changes, &fs, &request(old, None, vec![]));
    send_to(&changes, &fs, &request(new, Some(old), vec![]));
    let left = files(&fs, "new");
    assert!(!left.contains_key(&b"0"[..]));
    assert_eq!(files(&full, "new"), left);
    assert_eq!(files(&changes, "new"), left);
}

/// When the receiver truncates a file, the space that is preallocated past the new end is lost, so the stream must
/// preallocate it again.
#[test]
fn space_that_is_preallocated_past_the_end_of_a_shortened_file_arrives() {
    let fs = filesystem();
    let file = fs.lookup(InodeId::root_of(root(&fs, "live")), b"0").unwrap().id;
    fs.setattr(file, &SetAttr { size: Some(0), ..SetAttr::default() }, &Caller::ROOT).unwrap();
    fs.fallocate(file, 0, 48 << 10, FallocateMode::empty()).unwrap();
    let old = snapshot(&fs, "s0");
    fs.setattr(file, &SetAttr { size: Some(3000), ..SetAttr::default() }, &Caller::ROOT).unwrap();
    fs.fallocate(file, 4096, 92 << 10, FallocateMode::KEEP_SIZE).unwrap();
    let new = snapshot(&fs, "s1");
    let mut streams = [Vec::new(), Vec::new()];
    for (stream, (id, parent)) in streams.iter_mut().zip([(old, None), (new, Some(old))]) {
        let request = SendRequest { version: 2, ..request(id, parent, vec![]) };
        fs.send(&request, stream, &Job::new()).unwrap();
    }
    let receiver = filesystem();
    for stream in &streams {
        receiver.receive(receiver.root(), &stream[..], &ReceiveOptions::default(), &Job::new(), &mut |_| {}).unwrap();
    }
    for (fs, name) in [(&fs, "s0"), (&receiver, "s0"), (&fs, "s1"), (&receiver, "s1")] {
        let id = fs.lookup(InodeId::root_of(root(fs, name)), b"0").unwrap().id;
        let extents = fs.extents(id).unwrap();
        let is_prealloc = |extent: &&FileExtentInfo| extent.kind == FileExtentKind::Prealloc;
        let past = extents.iter().filter(is_prealloc).filter(|extent| extent.offset + extent.len_bytes > 4096);
        let bytes: u64 = past.map(|extent| extent.offset + extent.len_bytes - extent.offset.max(4096)).sum();
        assert_eq!(bytes, if name == "s0" { 44 << 10 } else { 92 << 10 }, "{name}: {extents:?}");
    }
}
