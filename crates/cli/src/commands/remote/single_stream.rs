//! [`SingleStream`]: passes a stream of a store on, and makes sure that it makes the snapshot of the manifest, and no other.
//!
//! A receive takes any number of subvolumes from its input. Without encryption, whoever can write to the store can write
//! any stream. So a stream that begins another subvolume, or goes on after its end, is cut off.

use std::io::{self, Write};

use ubtrfs_format::print::escaped;
use ubtrfs_remote::SnapshotManifest;
use ubtrfs_stream::{CommandKind, FrameReader, HEADER_BYTES, STREAM_HEADER_BYTES, StreamCommand, StreamError, parse};
use uuid::Uuid;

/// Writes a stream to `out` while it is that of a manifest.
pub(super) struct SingleStream<'m, W> {
    manifest: &'m SnapshotManifest,
    out: W,
    /// Bytes that wait until the command that makes the snapshot is complete.
    first: Vec<u8>,
    state: StreamState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    /// The command that makes the snapshot is not complete.
    Beginning,
    /// This many bytes of a command follow.
    Body(u64),
    /// These bytes of a command's head are known.
    Head([u8; HEADER_BYTES], usize),
    /// After the end of the stream.
    Ended,
}

impl<'m, W: Write> SingleStream<'m, W> {
    pub(super) fn new(manifest: &'m SnapshotManifest, out: W) -> Self {
        Self { manifest, out, first: Vec::new(), state: StreamState::Beginning }
    }

    /// Checks the first command. Returns the length of everything up to its end, or `None` if it is not complete.
    fn check_first(&self) -> io::Result<Option<usize>> {
        let Some(head) = self.first.get(STREAM_HEADER_BYTES..STREAM_HEADER_BYTES + HEADER_BYTES) else {
            return Ok(None);
        };
        let len = STREAM_HEADER_BYTES + HEADER_BYTES + length(head);
        if len > MOST_FIRST_BYTES {
            return Err(wrong("it does not begin with a subvolume"));
        }
        let Some(whole) = self.first.get(..len) else { return Ok(None) };
        let mut reader = FrameReader::new(whole);
        let mut bytes = Vec::new();
        let mut read = || -> Result<Option<bool>, StreamError> {
            reader.stream()?;
            let Some(header) = reader.command(&mut bytes)? else { return Ok(None) };
            header.verify(&bytes)?;
            parse(&header, &bytes).map(|command| self.makes_it(&command)).map(Some)
        };
        match read() {
            Ok(Some(true)) => Ok(Some(len)),
            Ok(_) => Err(wrong(&format!("it does not make the snapshot {}", escaped(&self.manifest.name)))),
            Err(error) => Err(wrong(&error.to_string())),
        }
    }

    /// Whether a command makes the snapshot of the manifest.
    fn makes_it(&self, command: &StreamCommand<'_>) -> bool {
        let (name, uuid, parent): (&[u8], &Uuid, Option<&Uuid>) = match command {
            StreamCommand::Subvol { path, uuid, .. } => (path, uuid, None),
            StreamCommand::Snapshot { path, uuid, clone_uuid, .. } => (path, uuid, Some(clone_uuid)),
            _ => return false,
        };
        name == self.manifest.name
            && *uuid == self.manifest.key.uuid
            && parent == self.manifest.parent.as_ref().map(|parent| &parent.uuid)
    }

    /// Follows the commands in bytes. Returns an error before the bytes that must not pass.
    fn follow(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match &mut self.state {
                StreamState::Beginning => return Err(wrong("it has no beginning")),
                StreamState::Ended => return Err(wrong("it goes on after its end")),
                StreamState::Body(left) => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= taken as u64;
                    bytes = &bytes[taken..];
                    if *left == 0 {
                        self.state = StreamState::Head([0; HEADER_BYTES], 0);
                    }
                }
                StreamState::Head(head, known) => {
                    let taken = (HEADER_BYTES - *known).min(bytes.len());
                    head[*known..*known + taken].copy_from_slice(&bytes[..taken]);
                    *known += taken;
                    bytes = &bytes[taken..];
                    if *known == HEADER_BYTES {
                        let (len, number) = (length(&head[..]), u16::from_le_bytes([head[4], head[5]]));
                        self.state = match CommandKind::from_number(number) {
                            Some(CommandKind::Subvol | CommandKind::Snapshot) => {
                                return Err(wrong("it makes more than one subvolume"));
                            }
                            Some(CommandKind::End) if len == 0 => StreamState::Ended,
                            _ if len == 0 => StreamState::Head([0; HEADER_BYTES], 0),
                            _ => StreamState::Body(len as u64),
                        };
                    }
                }
            }
        }
        Ok(())
    }
}

/// The length of a command's attributes, of its head.
fn length(head: &[u8]) -> usize {
    let bytes = head.first_chunk().copied().unwrap_or([u8::MAX; 4]);
    usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX)
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the stream is not that of the manifest: {what}"))
}

impl<W: Write> Write for SingleStream<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.state != StreamState::Beginning {
            self.follow(bytes)?;
            self.out.write_all(bytes)?;
            return Ok(bytes.len());
        }
        self.first.extend_from_slice(bytes);
        if let Some(len) = self.check_first()? {
            self.state = StreamState::Head([0; HEADER_BYTES], 0);
            let first = std::mem::take(&mut self.first);
            self.follow(&first[len..])?;
            self.out.write_all(&first)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// More than a command that makes a subvolume can have.
const MOST_FIRST_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use ubtrfs_remote::{SnapshotKey, SnapshotTime};
    use ubtrfs_stream::{StreamVersion, StreamWriter};

    use super::*;

    fn manifest(parent: Option<u128>) -> SnapshotManifest {
        let key = |nr| SnapshotKey { uuid: Uuid::from_u128(nr), ctransid: 3 };
        SnapshotManifest {
            key: key(1),
            name: b"s".to_vec(),
            parent: parent.map(key),
            source: None,
            generation: 1,
            created: SnapshotTime::default(),
            pushed: 0,
            stream_bytes: 0,
            stored_bytes: 0,
            part_bytes: 1,
            parts: Vec::new(),
        }
    }

    fn stream(commands: &[StreamCommand<'_>]) -> Vec<u8> {
        let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V2).unwrap();
        commands.iter().for_each(|command| writer.command(command).unwrap());
        writer.into_inner()
    }

    /// Passes a stream in pieces of this length. Returns what arrived, and the error.
    fn passed(manifest: &SnapshotManifest, stream: &[u8], len: usize) -> (Vec<u8>, Option<String>) {
        let mut out = Vec::new();
        let mut single = SingleStream::new(manifest, &mut out);
        let error = stream.chunks(len).find_map(|piece| single.write_all(piece).err());
        (out, error.map(|error| error.to_string()))
    }

    #[test]
    fn only_the_stream_of_the_manifest_passes() {
        let uuid = Uuid::from_u128(1);
        let subvol = StreamCommand::Subvol { path: b"s", uuid, ctransid: 9 };
        let (clone_uuid, clone_ctransid) = (Uuid::from_u128(2), 1);
        let snapshot = StreamCommand::Snapshot { path: b"s", uuid, ctransid: 9, clone_uuid, clone_ctransid };
        let data = vec![7; 3000];
        let write = StreamCommand::Write { path: b"f", offset: 0, data: &data };
        let end = StreamCommand::End;
        let other = StreamCommand::Subvol { path: b"t", uuid, ctransid: 9 };
        let stranger = StreamCommand::Subvol { path: b"s", uuid: clone_uuid, ctransid: 9 };
        for len in [1, 7, 64, 100_000] {
            let good = stream(&[subvol.clone(), write.clone(), end.clone()]);
            assert_eq!(passed(&manifest(None), &good, len), (good.clone(), None));
            let good = stream(&[snapshot.clone(), write.clone(), end.clone()]);
            assert_eq!(passed(&manifest(Some(2)), &good, len), (good.clone(), None));
            for (parent, commands, words) in [
                (None, vec![snapshot.clone(), end.clone()], "does not make"),
                (Some(2), vec![subvol.clone(), end.clone()], "does not make"),
                (Some(3), vec![snapshot.clone(), end.clone()], "does not make"),
                (None, vec![other.clone(), end.clone()], "does not make"),
                (None, vec![stranger.clone(), end.clone()], "does not make"),
                (None, vec![write.clone(), end.clone()], "does not make"),
                (None, vec![subvol.clone(), other.clone(), end.clone()], "more than one"),
                (None, vec![subvol.clone(), write.clone(), end.clone(), other.clone()], "after its end"),
            ] {
                let (out, error) = passed(&manifest(parent), &stream(&commands), len);
                assert!(error.as_ref().is_some_and(|error| error.contains(words)), "{error:?}: {commands:?}");
                let second = StreamCommand::Subvol { path: b"t", uuid, ctransid: 9 };
                let is_in = stream(&[second]).split_off(STREAM_HEADER_BYTES);
                assert!(!out.windows(is_in.len()).any(|part| part == is_in), "nothing of it passed");
            }
        }
    }
}
