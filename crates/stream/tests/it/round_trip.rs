//! Tests that each command survives encoding and parsing in each version. Also parses every prefix of a stream, and
//! crafted and random bytes.

use proptest::prelude::*;
use ubtrfs_format::item::Timespec;
use ubtrfs_stream::{
    Attribute, CommandKind, EncodeError, FrameReader, HEADER_BYTES, MAX_COMMAND_BYTES, STREAM_HEADER_BYTES,
    StreamCommand, StreamProblem, StreamVersion, StreamWriter, encode, encode_with,
};
use ubtrfs_testkit::hostile::for_each_command;
use uuid::Uuid;

const VERSIONS: [StreamVersion; 3] = [StreamVersion::V1, StreamVersion::V2, StreamVersion::V3];

/// An example of each command.
fn commands() -> Vec<StreamCommand<'static>> {
    let (uuid, clone_uuid) = (Uuid::from_u128(0x1234), Uuid::from_u128(0x5678));
    let time = |sec| Timespec { sec, nsec: 999_999_999 };
    let path = b"dir/na me\xff";
    vec![
        StreamCommand::Subvol { path: b"snap", uuid, ctransid: 7 },
        StreamCommand::Snapshot { path: b"snap2", uuid, ctransid: 9, clone_uuid, clone_ctransid: 7 },
        StreamCommand::Mkfile { path, ino: 257 },
        StreamCommand::Mkdir { path, ino: 258 },
        StreamCommand::Mknod { path, ino: 259, rdev: 0x103, mode: 0o20644 },
        StreamCommand::Mkfifo { path, ino: 260, rdev: 0, mode: 0o10644 },
        StreamCommand::Mksock { path, ino: 261, rdev: 0, mode: 0o140_755 },
        StreamCommand::Symlink { path, ino: 262, target: b"../else" },
        StreamCommand::Rename { path, to: b"b" },
        StreamCommand::Link { path, target: b"b" },
        StreamCommand::Unlink { path },
        StreamCommand::Rmdir { path },
        StreamCommand::SetXattr { path, name: b"user.x", data: b"\0\x01value" },
        StreamCommand::SetXattr { path, name: b"user.empty", data: b"" },
        StreamCommand::RemoveXattr { path, name: b"user.x" },
        StreamCommand::Write { path, offset: 1 << 40, data: b"some data" },
        StreamCommand::Write { path, offset: 0, data: b"" },
        StreamCommand::Clone {
            offset: 4096,
            len: 8192,
            path,
            clone_uuid,
            clone_ctransid: 8,
            clone_path: b"c",
            clone_offset: 12288,
        },
        StreamCommand::Truncate { path, size: u64::MAX },
        StreamCommand::Chmod { path, mode: 0o6755 },
        StreamCommand::Chown { path, uid: 1000, gid: u64::from(u32::MAX) },
        StreamCommand::Utimes { path, atime: time(-1), mtime: time(0), ctime: time(i64::MAX), otime: None },
        StreamCommand::UpdateExtent { path, offset: 1, size: 2 },
        StreamCommand::Utimes { path, atime: time(1), mtime: time(2), ctime: time(3), otime: Some(time(4)) },
        StreamCommand::Fallocate { path, mode: 3, offset: 4096, size: 4096 },
        StreamCommand::Fileattr { path, attr: 0x64 },
        StreamCommand::EncodedWrite {
            path,
            offset: 0,
            unencoded_file_len: 6784,
            unencoded_len: 8192,
            unencoded_offset: 0,
            compression: Some(2),
            encryption: Some(0),
            data: b"compressed",
        },
        StreamCommand::EncodedWrite {
            path,
            offset: 0,
            unencoded_file_len: 900,
            unencoded_len: 900,
            unencoded_offset: 0,
            compression: Some(1),
            encryption: None,
            data: b"inline",
        },
        StreamCommand::EnableVerity { path, algorithm: 1, block_size: 4096, salt: b"salt", signature: b"" },
        StreamCommand::End,
    ]
}

/// The commands that a version has.
fn commands_of(version: StreamVersion) -> Vec<StreamCommand<'static>> {
    let otime = |command: &StreamCommand<'_>| matches!(command, StreamCommand::Utimes { otime: Some(_), .. });
    commands()
        .into_iter()
        .filter(|command| command.kind().since() <= version && (version >= StreamVersion::V2 || !otime(command)))
        .collect()
}

fn stream(version: StreamVersion, commands: &[StreamCommand<'_>]) -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), version).unwrap();
    for command in commands {
        writer.command(command).unwrap();
    }
    writer.into_inner()
}

#[test]
fn each_command_is_read_as_it_was_written() {
    for version in VERSIONS {
        let commands = commands_of(version);
        let bytes = stream(version, &commands);
        let mut expected = commands.iter();
        for_each_command(&bytes, |header, command, bytes| {
            assert_eq!(header.version, version);
            assert_eq!(Some(command), expected.next());
            let mut again = Vec::new();
            encode(version, command, &mut again).unwrap();
            assert_eq!(again, bytes, "{command:?}");
        })
        .unwrap();
        assert_eq!(expected.next(), None);
    }
    let kinds: Vec<CommandKind> = commands().iter().map(StreamCommand::kind).collect();
    assert!(CommandKind::ALL.iter().all(|kind| kinds.contains(kind)));
}

#[test]
fn several_streams_follow_each_other() {
    let mut bytes = stream(StreamVersion::V1, &commands_of(StreamVersion::V1));
    bytes.extend(stream(StreamVersion::V2, &commands_of(StreamVersion::V2)));
    let mut count = 0;
    for_each_command(&bytes, |_, _, _| count += 1).unwrap();
    assert_eq!(count, commands_of(StreamVersion::V1).len() + commands_of(StreamVersion::V2).len());
}

#[test]
fn every_prefix_ends_between_commands_or_fails() {
    for version in VERSIONS {
        let bytes = stream(version, &commands_of(version));
        let mut ends = vec![0, STREAM_HEADER_BYTES];
        for_each_command(&bytes, |_, _, command| ends.push(ends.last().unwrap() + command.len())).unwrap();
        for len in 0..bytes.len() {
            let result = for_each_command(&bytes[..len], |_, _, _| {});
            if ends.contains(&len) {
                result.unwrap();
                continue;
            }
            let error = result.unwrap_err();
            assert!(matches!(error.problem, StreamProblem::Truncated { .. }), "{len}: {error}");
            let start = ends.iter().rev().find(|end| **end < len).unwrap();
            assert_eq!(error.position.offset, *start as u64, "{error}");
        }
    }
}

#[test]
fn each_changed_bit_is_noticed() {
    let bytes = stream(StreamVersion::V2, &commands_of(StreamVersion::V2));
    for at in STREAM_HEADER_BYTES..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(for_each_command(&changed, |_, _, _| {}).is_err(), "bit {bit} of byte {at}");
        }
    }
}

/// A stream of one command with a good checksum and the given bytes as attributes.
fn crafted(version: StreamVersion, number: u16, attributes: &[u8]) -> Vec<u8> {
    let mut bytes = stream(version, &[]);
    let start = bytes.len();
    bytes.extend(u32::try_from(attributes.len()).unwrap().to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(attributes);
    let crc = ubtrfs_format::hash::crc32c_raw(0, &bytes[start..]);
    bytes[start + 6..start + HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn attribute(number: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(u16::try_from(value.len()).unwrap().to_le_bytes());
    bytes.extend(value);
    bytes
}

#[test]
fn wrong_input_is_refused_with_its_reason() {
    let fails = |bytes: &[u8]| for_each_command(bytes, |_, _, _| {}).unwrap_err().to_string();
    let path = attribute(Attribute::Path.number(), b"p");
    let size = attribute(Attribute::Size.number(), &[0; 8]);
    let with = |number, parts: &[&[u8]]| crafted(StreamVersion::V1, number, &parts.concat());

    assert_eq!(fails(b"PK\x03\x04 and so on, an archive"), {
        "header at byte 0: this is not a send stream (it does not start with 'btrfs-stream')"
    });
    let mut new = stream(StreamVersion::V1, &[]);
    new[13] = 4;
    assert!(fails(&new).contains("version 4 of the send stream is not supported"));
    assert_eq!(fails(&with(99, &[&path])), "command 1 at byte 17: unknown command number 99");
    assert_eq!(fails(&with(17, &[&path])), "command 1 (truncate) at byte 17: attribute size is missing");
    assert!(fails(&with(17, &[&path, &path, &size])).contains("attribute path occurs twice"));
    assert!(fails(&with(17, &[&path, &size[..7]])).contains("(number 4) reaches beyond the end"));
    assert!(fails(&with(17, &[&path, &attribute(4, &[0; 4])])).contains("size has 4 bytes, expected 8"));
    assert!(fails(&with(25, &[&path])).contains("version 1 of the send stream does not have this command"));
    assert!(fails(&with(17, &[&path, &size, &[1]])).contains("beyond the end"));
    let mut time = [0; 12];
    time[8..].copy_from_slice(&1_000_000_000_u32.to_le_bytes());
    let times: Vec<u8> = [9, 10, 11].iter().flat_map(|number| attribute(*number, &time)).collect();
    assert!(fails(&with(20, &[&path, &times])).contains("atime is 1000000000"));
    let mut bad = with(17, &[&path, &size]);
    *bad.last_mut().unwrap() = 1;
    assert!(fails(&bad).starts_with("command 1 (truncate) at byte 17: bad crc"));
    // An unknown attribute is ignored.
    for_each_command(&with(17, &[&path, &attribute(99, b"?"), &size]), |_, _, _| {}).unwrap();
}

#[test]
fn a_claimed_length_allocates_nothing() {
    let mut bytes = stream(StreamVersion::V2, &[]);
    bytes.extend((u32::MAX).to_le_bytes());
    bytes.extend([15, 0, 0, 0, 0, 0]);
    let error = for_each_command(&bytes, |_, _, _| {}).unwrap_err();
    assert!(matches!(error.problem, StreamProblem::TooLong(_)), "{error}");
    // A claimed length within the limit does not make the reader allocate all of it in advance.
    bytes[17..21].copy_from_slice(&(MAX_COMMAND_BYTES as u32 - 100).to_le_bytes());
    let mut reader = FrameReader::new(&bytes[..]);
    reader.stream().unwrap();
    let mut out = Vec::new();
    assert!(reader.command(&mut out).is_err());
    assert!(out.capacity() <= 1 << 20, "{}", out.capacity());
}

#[test]
fn a_command_that_does_not_fit_writes_nothing() {
    let mut out = b"before".to_vec();
    let fallocate = StreamCommand::Fallocate { path: b"p", mode: 0, offset: 0, size: 0 };
    assert!(matches!(encode(StreamVersion::V1, &fallocate, &mut out), Err(EncodeError::NotInVersion { .. })));
    let data = vec![1; 64 << 10];
    let write = StreamCommand::Write { path: b"p", offset: 0, data: &data };
    assert!(matches!(encode(StreamVersion::V1, &write, &mut out), Err(EncodeError::TooLong { .. })));
    let write = StreamCommand::Write { path: b"p", offset: 0, data: &data[..65_530] };
    assert!(matches!(encode(StreamVersion::V1, &write, &mut out), Err(EncodeError::TooLong { .. })));
    // Receivers accept paths of at most 4095 bytes.
    let path = b"d/".repeat(2048);
    assert!(
        encode(StreamVersion::V1, &StreamCommand::Mkdir { path: &path[..4095], ino: 300 }, &mut Vec::new()).is_ok()
    );
    let long = StreamCommand::Rename { path: b"p", to: &path };
    assert!(matches!(encode(StreamVersion::V1, &long, &mut out), Err(EncodeError::PathTooLong { len: 4096, .. })));
    let failed: Result<(), EncodeError> =
        encode_with(StreamVersion::V2, &write, 10, &mut out, |_| Err(std::io::Error::other("disk").into()));
    assert!(failed.is_err());
    assert_eq!(out, b"before");
}

#[test]
fn data_is_filled_in_place() {
    let (mut filled, mut copied) = (Vec::new(), Vec::new());
    let write = |data| StreamCommand::Write { path: b"p", offset: 5, data };
    encode_with::<EncodeError>(StreamVersion::V1, &write(b""), 3, &mut filled, |room| {
        room.copy_from_slice(b"abc");
        Ok(())
    })
    .unwrap();
    encode(StreamVersion::V1, &write(b"abc"), &mut copied).unwrap();
    assert_eq!(filled, copied);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_attributes_never_panic(
        version in 0..3_usize, number in 0_u16..28,
        parts in prop::collection::vec((0_u16..38, prop::collection::vec(any::<u8>(), 0..20)), 0..8),
        cut in 0..3_usize,
    ) {
        let mut bytes: Vec<u8> = parts.iter().flat_map(|(number, value)| attribute(*number, value)).collect();
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        let version = VERSIONS[version];
        let _ = for_each_command(&crafted(version, number, &bytes), |header, command, _| {
            let mut again = Vec::new();
            encode(header.version, command, &mut again).unwrap();
        });
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = for_each_command(&bytes, |_, _, _| {});
        let mut after = stream(StreamVersion::V2, &[]);
        after.extend(bytes);
        let _ = for_each_command(&after, |_, _, _| {});
    }
}
