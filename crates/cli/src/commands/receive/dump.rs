//! `ubtrfs receive --dump`: prints one line for each command of a stream, as `btrfs receive --dump` does.
//!
//! Times are in UTC. Bytes that are not printable ASCII are escaped everywhere, because a stream is untrusted input.

use std::io::{BufReader, Write};
use std::os::fd::BorrowedFd;

use anyhow::Context;
use ubtrfs_format::item::Timespec;
use ubtrfs_stream::{FrameReader, StreamCommand, parse};

use crate::commands::subvolume::seconds_text;
use crate::common::{OUTPUT_LOST, stdout};

pub(super) fn run(stream: BorrowedFd<'_>, only_first: bool) -> anyhow::Result<()> {
    let input = std::fs::File::from(stream.try_clone_to_owned()?);
    let mut reader = FrameReader::new(BufReader::with_capacity(256 << 10, input));
    let mut out = std::io::BufWriter::new(stdout());
    let mut bytes = Vec::new();
    let mut subvolume = Vec::new();
    let mut nr_streams = 0;
    let mut dump = || -> anyhow::Result<()> {
        while reader.stream()?.is_some() {
            nr_streams += 1;
            loop {
                bytes.clear();
                let Some(header) = reader.command(&mut bytes)? else {
                    anyhow::bail!("the stream ends at byte {} without an end command", reader.offset());
                };
                header.verify(&bytes)?;
                let command = parse(&header, &bytes)?;
                if command == StreamCommand::End {
                    break;
                }
                if let StreamCommand::Subvol { path, .. } | StreamCommand::Snapshot { path, .. } = command {
                    subvolume = [b"./", path].concat();
                }
                writeln!(out, "{}", line(&subvolume, &command)).context(OUTPUT_LOST)?;
            }
            if only_first {
                break;
            }
        }
        anyhow::ensure!(nr_streams > 0, "the stream is empty");
        Ok(())
    };
    // If the dump fails, the lines before the error are still printed.
    let dumped = dump();
    out.flush().context(OUTPUT_LOST)?;
    dumped
}

fn line(subvolume: &[u8], command: &StreamCommand<'_>) -> String {
    let whole = |path: &[u8]| [subvolume, b"/", path].concat();
    let path = match command {
        StreamCommand::Subvol { .. } | StreamCommand::Snapshot { .. } => subvolume.to_vec(),
        other => whole(other.path().unwrap_or_default()),
    };
    let mut line = format!("{:<16}", command.kind());
    let details = details(command, &whole);
    match details.is_empty() {
        true => line.push_str(&escaped(&path, true)),
        false => line.push_str(&format!("{:<31} {details}", escaped(&path, true))),
    }
    line
}

fn details(command: &StreamCommand<'_>, whole: &dyn Fn(&[u8]) -> Vec<u8>) -> String {
    match *command {
        StreamCommand::Subvol { uuid, ctransid, .. } => format!("uuid={uuid} transid={ctransid}"),
        StreamCommand::Snapshot { uuid, ctransid, clone_uuid, clone_ctransid, .. } => {
            format!("uuid={uuid} transid={ctransid} parent_uuid={clone_uuid} parent_transid={clone_ctransid}")
        }
        StreamCommand::Mkfile { .. }
        | StreamCommand::Mkdir { .. }
        | StreamCommand::Mkfifo { .. }
        | StreamCommand::Mksock { .. }
        | StreamCommand::Unlink { .. }
        | StreamCommand::Rmdir { .. }
        | StreamCommand::End => String::new(),
        StreamCommand::Mknod { rdev, mode, .. } => format!("mode={mode:o} dev=0x{rdev:x}"),
        StreamCommand::Symlink { target, .. } => format!("dest={}", escaped(target, true)),
        StreamCommand::Rename { to, .. } => format!("dest={}", escaped(&whole(to), true)),
        StreamCommand::Link { target, .. } => format!("dest={}", escaped(target, true)),
        StreamCommand::SetXattr { name, data, .. } => {
            format!("name={} data={} len={}", escaped(name, false), escaped(data, false), data.len())
        }
        StreamCommand::RemoveXattr { name, .. } => format!("name={}", escaped(name, false)),
        StreamCommand::Write { offset, data, .. } => format!("offset={offset} len={}", data.len()),
        StreamCommand::Clone { offset, len, clone_path, clone_offset, .. } => {
            let from = escaped(&whole(clone_path), false);
            format!("offset={offset} len={len} from={from} clone_offset={clone_offset}")
        }
        StreamCommand::Truncate { size, .. } => format!("size={size}"),
        StreamCommand::Chmod { mode, .. } => format!("mode={mode:o}"),
        StreamCommand::Chown { uid, gid, .. } => format!("gid={gid} uid={uid}"),
        StreamCommand::Utimes { atime, mtime, ctime, .. } => {
            format!("atime={} mtime={} ctime={}", time(atime), time(mtime), time(ctime))
        }
        StreamCommand::UpdateExtent { offset, size, .. } => format!("offset={offset} len={size}"),
        StreamCommand::Fallocate { mode, offset, size, .. } => format!("mode={mode} offset={offset} len={size}"),
        // btrfs-progs prints the number in decimal, but after `0x`.
        StreamCommand::Fileattr { attr, .. } => format!("fileattr=0x{attr}"),
        StreamCommand::EncodedWrite {
            offset,
            unencoded_file_len,
            unencoded_len,
            unencoded_offset,
            compression,
            encryption,
            data,
            ..
        } => format!(
            "offset={offset} len={}, unencoded_file_len={unencoded_file_len}, unencoded_len={unencoded_len}, \
             unencoded_offset={unencoded_offset}, compression={}, encryption={}",
            data.len(),
            compression.unwrap_or(0),
            encryption.unwrap_or(0),
        ),
        StreamCommand::EnableVerity { algorithm, block_size, salt, signature, .. } => {
            let (salt, signature) = (salt.len(), signature.len());
            format!("algorithm={algorithm} block_size={block_size} salt_len={salt} sig_len={signature}")
        }
    }
}

fn time(time: Timespec) -> String {
    format!("{}+0000", seconds_text(time).replacen(' ', "T", 1))
}

/// Escapes bytes as btrfs-progs does: with a letter (`\n`) if there is one, else as an octal number. Spaces are escaped
/// only if `spaces` is set.
fn escaped(bytes: &[u8], spaces: bool) -> String {
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b' ' if spaces => out.push_str("\\ "),
            0x07 => out.push_str("\\a"),
            0x08 => out.push_str("\\b"),
            0x1b => out.push_str("\\e"),
            0x0c => out.push_str("\\f"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            0x0b => out.push_str("\\v"),
            b' '..=b'~' => out.push(char::from(*byte)),
            other => out.push_str(&format!("\\{other:03o}")),
        }
    }
    out
}
