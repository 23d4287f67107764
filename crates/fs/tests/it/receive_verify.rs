//! Tests receiving with verification: a good stream passes. If the data has no checksums and the device stores it
//! wrongly, verification finds the difference.

use std::io;
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Fs, Job, MountOptions, ReceiveError, ReceiveOptions, ReceiveReport};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};
use ubtrfs_testkit::{Medium, MediumDevice};
use uuid::Uuid;

/// A device that changes one byte of each written block that consists only of [`BAD`].
#[derive(Debug)]
struct Flipping(MediumDevice);

const BAD: u8 = 0x5a;

impl Device for Flipping {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut data = data.to_vec();
        for block in data.chunks_mut(4096) {
            if block.iter().all(|byte| *byte == BAD) {
                block[77] ^= 1;
            }
        }
        self.0.write_at(offset, &data)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

fn filesystem() -> Arc<Fs> {
    let device = MediumDevice::new(Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap());
    let device: Arc<dyn Device> = Arc::new(Flipping(device));
    Fs::open(vec![device], MountOptions::parse("nodatasum").unwrap()).unwrap()
}

fn receive(fs: &Fs, commands: &[StreamCommand<'_>]) -> Result<ReceiveReport, ReceiveError> {
    let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V2).unwrap();
    writer.command(&StreamCommand::Subvol { path: b"s", uuid: Uuid::from_u128(1), ctransid: 7 }).unwrap();
    for command in commands {
        writer.command(command).unwrap();
    }
    writer.command(&StreamCommand::End).unwrap();
    let options = ReceiveOptions { verify: true, ..ReceiveOptions::default() };
    fs.receive(fs.root(), &writer.into_inner()[..], &options, &Job::new(), &mut |_| {})
}

#[test]
fn verify_reads_received_data_again_and_compares_it() {
    let fs = filesystem();
    let (one, other) = (vec![1; 100_000], vec![2; 30_000]);
    let time = |sec| Timespec { sec, nsec: 5 };
    let utimes = |path| StreamCommand::Utimes { path, atime: time(1), mtime: time(2), ctime: time(3), otime: None };
    let f: &[u8] = b"d/f";
    let commands = [
        StreamCommand::Mkdir { path: b"d", ino: 257 },
        StreamCommand::Mkfile { path: b"o258-7-0", ino: 258 },
        StreamCommand::Rename { path: b"o258-7-0", to: f },
        StreamCommand::Write { path: f, offset: 0, data: &one },
        StreamCommand::Write { path: f, offset: 100_000, data: &one },
        // This write overwrites the end of the first write and the start of the second.
        StreamCommand::Write { path: f, offset: 90_000, data: &other },
        StreamCommand::Write { path: f, offset: 1 << 20, data: &other },
        StreamCommand::Truncate { path: f, size: (1 << 20) + 10_000 },
        StreamCommand::Chown { path: f, uid: 5, gid: 6 },
        StreamCommand::Chmod { path: f, mode: 0o4755 },
        utimes(f),
        StreamCommand::Mkfile { path: b"gone", ino: 259 },
        StreamCommand::Write { path: b"gone", offset: 0, data: &one },
        StreamCommand::Unlink { path: b"gone" },
        utimes(b"d"),
    ];
    let verified = receive(&fs, &commands).unwrap().verified;
    assert_eq!(verified.nr_inodes, 2, "{verified:?}");
    assert_eq!(verified.bytes_compared, 30_000, "{verified:?}");
    assert!(verified.bytes_read >= 210_000 && verified.bytes_read < 400_000, "{verified:?}");
    let attr = fs.lookup_path(b"s/d/f", false).unwrap();
    assert_eq!((attr.atime, attr.mtime), (time(1), time(2)), "the comparison changes no times");
    fs.close().unwrap();
}

#[test]
fn data_that_the_device_stores_wrongly_fails_the_receive() {
    let fs = filesystem();
    let bad = [BAD; 8192];
    let commands = [
        StreamCommand::Mkfile { path: b"f", ino: 257 },
        StreamCommand::Write { path: b"f", offset: 0, data: &[1; 8192] },
        StreamCommand::Write { path: b"f", offset: 8192, data: &bad },
    ];
    let error = receive(&fs, &commands).unwrap_err().to_string();
    assert!(error.contains("'f' differs from the stream when it is read again: its data"), "{error}");
    assert!(fs.lookup_path(b"s", false).is_err(), "it is deleted");
    // Without the write of the bad bytes, the same stream passes.
    receive(&fs, &commands[..2]).unwrap();
    fs.close().unwrap();
}
