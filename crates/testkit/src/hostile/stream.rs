//! Send streams as hostile input.

use ubtrfs_stream::{Command, FrameReader, HEADER_BYTES, STREAM_HEADER_BYTES, StreamError, encode, parse};

/// Parses a stream unchanged, and again with corrected checksums. A stream that parses is encoded again, and must parse
/// to equal commands.
pub fn stream(data: &[u8]) {
    let _ = read(data);
    let mut mended = data.to_vec();
    mend_checksums(&mut mended);
    let _ = read(&mended);
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

fn read(data: &[u8]) -> Result<(), StreamError> {
    let mut reader = FrameReader::new(data);
    let mut bytes = Vec::new();
    while let Some(version) = reader.stream()? {
        loop {
            bytes.clear();
            let Some(header) = reader.command(&mut bytes)? else { return Ok(()) };
            header.verify(&bytes)?;
            let command = parse(&header, &bytes)?;
            let mut again = Vec::new();
            // A data attribute of version 1 can make a command longer than a writer may write.
            if encode(version, &command, &mut again).is_ok() {
                let header = ubtrfs_stream::FrameHeader { len: (again.len() - HEADER_BYTES) as u32, ..header };
                let reparsed = parse(&header, &again);
                assert_eq!(reparsed.ok(), Some(command.clone()));
            }
            if command == Command::End {
                break;
            }
        }
    }
    Ok(())
}
