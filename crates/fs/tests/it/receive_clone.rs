//! Tests receives with `--clone` (`ReceiveOptions::shares`) in which data equals the data of a source file, but cannot
//! be shared with it. `testkit::send::check_cloned` tests receives whose data can be shared.

use std::io::Read;
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_fs::{
    Caller, Fs, InodeId, Job, MountOptions, NewInode, QgroupId, QuotaKind, ReceiveError, ReceiveOptions, ReceiveReport,
};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};
use ubtrfs_testkit::{Medium, MediumDevice, Rng, check_medium};

const LEN: usize = 4 << 20;
/// Bytes of data in one command.
const PIECE: usize = 64 << 10;

/// A filesystem with the snapshot `sent`, which has the files `a` and `b` of [`LEN`] bytes, and the stream of this
/// snapshot.
struct Bed {
    device: Arc<MediumDevice>,
    fs: Arc<Fs>,
    stream: Vec<u8>,
}

impl Bed {
    fn new() -> Self {
        let medium = Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap();
        let device = Arc::new(MediumDevice::new(medium));
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
        let live = fs.create_subvolume(fs.root(), b"live", &Caller::ROOT).unwrap();
        let mut rng = Rng::new(1);
        for name in ["a", "b"] {
            let file = fs.create(live, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap();
            assert_eq!(fs.write(file.id, 0, &rng.bytes(LEN)).unwrap(), LEN);
        }
        let sent = fs.snapshot_in(live.root, fs.root(), b"sent", true, &[]).unwrap();
        fs.create(fs.root(), b"copy", NewInode::dir(0o755), &Caller::ROOT).unwrap();
        let info = fs.subvolume_info(sent.root).unwrap();
        let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V2).unwrap();
        writer.command(&StreamCommand::Subvol { path: b"sent", uuid: info.uuid, ctransid: info.ctransid.0 }).unwrap();
        for (path, ino) in [(&b"a"[..], 257), (b"b", 258)] {
            writer.command(&StreamCommand::Mkfile { path, ino }).unwrap();
            let content = fs.read(fs.lookup(sent, path).unwrap().id, 0, LEN).unwrap();
            for (data, number) in content.chunks(PIECE).zip(0..) {
                writer.command(&StreamCommand::Write { path, offset: number * PIECE as u64, data }).unwrap();
            }
        }
        writer.command(&StreamCommand::End).unwrap();
        let stream = writer.into_inner();
        Self { device, fs, stream }
    }

    fn find(&self, path: &str) -> InodeId {
        self.fs.lookup_path(path.as_bytes(), false).unwrap().id
    }

    fn receive(
        &self,
        input: impl Read + Send,
        options: ReceiveOptions,
        job: &Job,
        made: impl Fn(InodeId),
    ) -> Result<ReceiveReport, ReceiveError> {
        let options = ReceiveOptions { shares: true, ..options };
        let mut made = |found: &ubtrfs_fs::ReceivedSubvolume| made(InodeId::root_of(found.id));
        self.fs.receive(self.find("copy"), input, &options, job, &mut made)
    }

    /// Receives the stream. When a part of the data of `a` has been applied, calls a function with the received `a`.
    fn receive_and(
        &self,
        options: ReceiveOptions,
        call: impl FnOnce(InodeId) + Send,
    ) -> Result<ReceiveReport, ReceiveError> {
        let job = Job::new();
        let input = Stops { bed: self, job: &job, at: 0, call: Some(call) };
        self.receive(input, options, &job, |_| {})
    }

    fn content(&self, path: &str) -> Vec<u8> {
        self.fs.read(self.find(path), 0, LEN + 1).unwrap()
    }

    fn is_equal(&self, name: &str) -> bool {
        self.content(&format!("sent/{name}")) == self.content(&format!("copy/sent/{name}"))
    }

    fn close(self) {
        self.fs.close().unwrap();
        check_medium(&self.device.content()).unwrap();
    }
}

/// An input with the stream of a bed. In the middle of the data of `a`, at [`STOP`], the input waits until the receiver
/// has applied nearly all commands before `STOP`, and then calls a function.
struct Stops<'b, F> {
    bed: &'b Bed,
    job: &'b Job,
    at: usize,
    call: Option<F>,
}

/// The offset in the stream at which [`Stops`] waits. The writes before this offset contain only a part of `a`.
const STOP: usize = LEN / 2;

impl<F: FnOnce(InodeId)> Read for Stops<'_, F> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let mut rest = &self.bed.stream[self.at..];
        if self.at < STOP {
            rest = &rest[..STOP - self.at];
        } else if let Some(call) = self.call.take() {
            // The last MiB before `STOP` may not be applied yet: the receiver may hold an incomplete command, and a
            // batch that is not full.
            while self.job.progress().done < (STOP - (1 << 20)) as u64 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            call(self.bed.find("copy/sent/a"));
        }
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        self.at += len;
        Ok(len)
    }
}

const NOCOW: u32 = 0x80_0000;
const IMMUTABLE: u32 = 0x10;

#[test]
fn equal_data_that_cannot_be_shared_is_written() {
    let bed = Bed::new();
    // No data of `a` is shared yet, so `a` is empty and can still become a file without checksums.
    let report = bed
        .receive_and(ReceiveOptions::default(), |id| bed.fs.set_inode_flags(id, NOCOW, &Caller::ROOT).unwrap())
        .unwrap();
    assert!(bed.is_equal("a") && bed.is_equal("b"));
    assert_eq!(report.bytes_shared, LEN as u64, "only b");
    bed.close();
}

#[test]
fn the_error_of_waiting_data_is_the_error_of_its_file_and_skips_no_other_command() {
    let bed = Bed::new();
    let options = ReceiveOptions { max_errors: 0, ..ReceiveOptions::default() };
    let report = bed.receive_and(options, |id| bed.fs.set_inode_flags(id, IMMUTABLE, &Caller::ROOT).unwrap()).unwrap();
    assert_eq!(report.nr_errors, 1);
    let error = &report.errors[0];
    assert_eq!((&error.path[..], error.position.unwrap().index), (&b"a"[..], 3), "{error}");
    assert!(bed.is_equal("b") && !bed.is_equal("a"));
    bed.close();
}

#[test]
fn a_source_that_changes_between_comparison_and_sharing_is_noticed() {
    let bed = Bed::new();
    // `write_opened` stands for a write through a file that was opened before its subvolume became read-only.
    let source = bed.find("sent/a");
    let done = bed.receive_and(ReceiveOptions::default(), |_| {
        bed.fs.write_opened(source, 0, b"changed", false).unwrap();
    });
    let error = done.unwrap_err();
    assert!(error.path == b"a" && error.to_string().contains("is being written"), "{error}");
    assert!(bed.fs.lookup(bed.find("copy"), b"sent").is_err());
    bed.close();
}

#[test]
fn a_receive_that_could_not_share_resumes_before_the_data_that_is_missing() {
    let bed = Bed::new();
    bed.fs.enable_quotas(QuotaKind::Full).unwrap();
    bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
    let limit = |dir: InodeId, bytes| bed.fs.limit_qgroup(QgroupId::of_subvolume(dir.root), Some(bytes), None).unwrap();
    for (most, file) in [(1 << 20, "a"), (LEN as u64 + (3 << 20), "b")] {
        let options = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
        let error = bed.receive(&bed.stream[..], options, &Job::new(), |dir| limit(dir, Some(most))).unwrap_err();
        assert_eq!(error.path, file.as_bytes(), "{error}");
        limit(bed.find("copy/sent"), None);
    }
    let options = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
    let report = bed.receive(&bed.stream[..], options, &Job::new(), |_| {}).unwrap();
    assert!(report.subvolumes[0].nr_resumed > 0);
    assert!(bed.is_equal("a") && bed.is_equal("b"));
    bed.close();
}
