//! Parses hostile send streams, and receives them into a small filesystem.

use std::sync::{Arc, OnceLock};

use ubtrfs_device::Device;
use ubtrfs_fs::{Fs, Job, MountOptions, ReceiveOptions};
use ubtrfs_stream::{
    FrameHeader, FrameReader, HEADER_BYTES, STREAM_HEADER_BYTES, StreamCommand, StreamError, encode, parse,
};

use crate::{Medium, MediumDevice};

/// Parses a stream unchanged, and again with corrected checksums. A stream that parses is encoded again, and must parse
/// to equal commands.
pub fn stream(data: &[u8]) {
    let _ = read(data);
    let mut mended = data.to_vec();
    mend_checksums(&mut mended);
    let _ = read(&mended);
}

/// Receives a stream with corrected checksums into a small filesystem; errors are allowed. The first byte of the
/// input chooses the options.
///
/// # Panics
/// If the filesystem is not clean afterwards, or a file beside the received subvolumes has changed.
pub fn receive(data: &[u8]) {
    let Some((how, stream)) = data.split_first() else { return };
    let mut stream = stream.to_vec();
    mend_checksums(&mut stream);
    let device = Arc::new(MediumDevice::new(small_filesystem().clone()));
    let fs = open(&device);
    let options = ReceiveOptions {
        max_errors: u64::from(how & 7),
        keep: how & 8 != 0,
        force_decompress: how & 16 != 0,
        ..ReceiveOptions::default()
    };
    let _ = fs.receive(fs.root(), &stream[..], &options, &Job::new(), &mut |_| {});
    assert_eq!(fs.read_only(), None, "a stream must not stop the filesystem");
    let beside = fs.lookup_path(BESIDE.0, false).expect("the file is still there");
    assert_eq!(fs.read(beside.id, 0, 100).expect("it can be read"), BESIDE.1);
    fs.close().expect("the filesystem is closed");
    crate::check_medium(&device.content()).expect("the filesystem is clean");
}

const BESIDE: (&[u8], &[u8]) = (b"beside", b"stays as it is");

fn open(device: &Arc<MediumDevice>) -> Arc<Fs> {
    Fs::open(vec![Arc::clone(device) as Arc<dyn Device>], MountOptions::default()).expect("a good filesystem opens")
}

/// A filesystem with one file.
fn small_filesystem() -> &'static Medium {
    static SMALL: OnceLock<Medium> = OnceLock::new();
    SMALL.get_or_init(|| {
        let empty = Medium::formatted(128 << 20, &ubtrfs_mkfs::MkfsOptions::default()).expect("mkfs works");
        let device = Arc::new(MediumDevice::new(empty));
        let fs = open(&device);
        let new = ubtrfs_fs::NewInode::file(0o644);
        let beside = fs.create(fs.root(), BESIDE.0, new, &ubtrfs_fs::Caller::ROOT).expect("a file can be made");
        fs.write(beside.id, 0, BESIDE.1).expect("it can be written");
        fs.close().expect("the filesystem is closed");
        device.content()
    })
}

/// Replaces the checksum of each whole command of the first stream by the right one.
pub fn mend_checksums(stream: &mut [u8]) {
    let mut rest = stream.get_mut(STREAM_HEADER_BYTES..).unwrap_or_default();
    while let Some((head, _)) = rest.split_first_chunk::<4>() {
        let whole = (u32::from_le_bytes(*head) as usize).saturating_add(HEADER_BYTES);
        if whole > rest.len() {
            return;
        }
        let (command, after) = rest.split_at_mut(whole);
        command[6..HEADER_BYTES].fill(0);
        let crc = ubtrfs_format::hash::crc32c_raw(0, command);
        command[6..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
        rest = after;
    }
}

/// Parses a stream; a command that parses is encoded again, and must parse to an equal command.
fn read(data: &[u8]) -> Result<(), StreamError> {
    for_each_command(data, |header, command, _| {
        let mut again = Vec::new();
        // Encoding may fail: a data attribute of version 1 can make a command longer than a writer may write.
        if encode(header.version, command, &mut again).is_ok() {
            let header = FrameHeader { len: (again.len() - HEADER_BYTES) as u32, ..*header };
            let reparsed = parse(&header, &again);
            assert_eq!(reparsed.ok().as_ref(), Some(command));
        }
    })
}

/// Passes each command of an input to `see`, with its header and its bytes. The checksums are verified.
///
/// # Errors
/// Fails if the input cannot be read or is invalid. The input may end before any command, even without `End`.
pub fn for_each_command(
    input: &[u8],
    mut see: impl FnMut(&FrameHeader, &StreamCommand<'_>, &[u8]),
) -> Result<(), StreamError> {
    let mut reader = FrameReader::new(input);
    let mut bytes = Vec::new();
    while reader.stream()?.is_some() {
        loop {
            bytes.clear();
            let Some(header) = reader.command(&mut bytes)? else { return Ok(()) };
            header.verify(&bytes)?;
            let command = parse(&header, &bytes)?;
            see(&header, &command, &bytes);
            if command == StreamCommand::End {
                break;
            }
        }
    }
    Ok(())
}
