//! Writes an archive: ustar headers, with pax records for values that do not fit into a header or have no field in it.

use std::io::{self, Write};

use ubtrfs_format::item::Timespec;

use super::{ArchiveMember, BLOCK, MemberKind, acl, padding};

/// Writes members one by one.
pub(crate) struct ArchiveWriter<W: Write> {
    out: W,
    /// Bytes of the current member's data that have not been written yet.
    left: u64,
    padding_len: usize,
}

impl<W: Write> ArchiveWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, left: 0, padding_len: 0 }
    }

    /// Begins a member. Calls of `data` must follow, with exactly `ArchiveMember::data_bytes` bytes in total.
    pub(crate) fn begin(&mut self, member: &ArchiveMember) -> io::Result<()> {
        assert_eq!(self.left, 0, "the member before is complete");
        let map = member.sparse.as_ref().map(|ranges| sparse_map(ranges, member.size));
        let data_len = member.data_bytes();
        let stored = data_len + map.as_ref().map_or(0, Vec::len) as u64;
        let records = records(member, stored);
        if !records.is_empty() {
            let mut header = HeaderBuilder::new(b"././@PaxHeader", b'x');
            header.octal(100, 8, 0o644);
            header.octal(124, 12, records.len() as u64);
            self.out.write_all(&header.finish())?;
            self.out.write_all(&records)?;
            self.out.write_all(&ZEROS[..padding(records.len() as u64)])?;
        }
        let mut header = HeaderBuilder::new(&member.path, type_byte(member.kind));
        header.octal(100, 8, member.mode.into());
        header.octal(108, 8, member.uid.into());
        header.octal(116, 8, member.gid.into());
        header.octal(124, 12, stored);
        header.octal(136, 12, u64::try_from(member.mtime.sec).unwrap_or(0));
        header.text(157, 100, &member.link);
        header.octal(329, 8, member.major.into());
        header.octal(337, 8, member.minor.into());
        self.out.write_all(&header.finish())?;
        if let Some(map) = map {
            self.out.write_all(&map)?;
        }
        self.left = data_len;
        self.padding_len = padding(stored);
        Ok(())
    }

    /// Writes data of the current member.
    pub(crate) fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.left -= bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Ends the current member.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        assert_eq!(self.left, 0, "all data was written");
        self.out.write_all(&ZEROS[..std::mem::take(&mut self.padding_len)])
    }

    /// Ends the archive with two blocks of zeros. The archive is not padded to tar's record of 20 blocks.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.flush()?;
        Ok(self.out)
    }
}

struct HeaderBuilder([u8; BLOCK]);

impl HeaderBuilder {
    fn new(path: &[u8], type_byte: u8) -> Self {
        let mut header = Self([0; BLOCK]);
        let (prefix, name) = split_path(path).unwrap_or((b"", &path[..path.len().min(100)]));
        header.text(0, 100, name);
        header.text(345, 155, prefix);
        header.0[156] = type_byte;
        header.text(257, 8, b"ustar\x0000");
        header.octal(108, 8, 0);
        header.octal(116, 8, 0);
        header.octal(136, 12, 0);
        header
    }

    fn text(&mut self, at: usize, len: usize, text: &[u8]) {
        let text = &text[..text.len().min(len)];
        self.0[at..at + text.len()].copy_from_slice(text);
    }

    /// Writes octal digits and a final zero. A value that does not fit is written as 0, because a pax record holds the
    /// value.
    fn octal(&mut self, at: usize, len: usize, value: u64) {
        let value = if fits_octal(value, len) { value } else { 0 };
        let text = format!("{value:0width$o}", width = len - 1);
        self.text(at, len, text.as_bytes());
    }

    fn finish(mut self) -> [u8; BLOCK] {
        self.0[148..156].fill(b' ');
        let sum: u32 = self.0.iter().map(|byte| u32::from(*byte)).sum();
        self.text(148, 8, format!("{sum:06o}\0 ").as_bytes());
        self.0
    }
}

fn fits_octal(value: u64, len: usize) -> bool {
    value < 1 << (3 * (len - 1))
}

/// Splits the path into ustar's prefix and name, if that is possible.
fn split_path(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.len() <= 100 {
        return Some((b"", path));
    }
    // The path is not split at its last byte, because a directory's final slash is part of its name.
    let cut = path[..path.len() - 1].iter().enumerate().skip(path.len().saturating_sub(101));
    cut.filter(|(_, byte)| **byte == b'/')
        .map(|(at, _)| at)
        .find(|at| (1..=155).contains(at))
        .map(|at| (&path[..at], &path[at + 1..]))
}

fn type_byte(kind: MemberKind) -> u8 {
    match kind {
        MemberKind::File => b'0',
        MemberKind::HardLink => b'1',
        MemberKind::Symlink => b'2',
        MemberKind::CharDevice => b'3',
        MemberKind::BlockDevice => b'4',
        MemberKind::Dir => b'5',
        MemberKind::Fifo => b'6',
    }
}

/// The pax records of a member: values that do not fit into its header or have no field in it.
fn records(member: &ArchiveMember, stored: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let sparse = member.sparse.is_some();
    if split_path(&member.path).is_none() {
        record(&mut out, b"path", &member.path);
    }
    if member.link.len() > 100 {
        record(&mut out, b"linkpath", &member.link);
    }
    if !fits_octal(stored, 12) {
        record(&mut out, b"size", stored.to_string().as_bytes());
    }
    for (key, id) in [("uid", member.uid), ("gid", member.gid)] {
        if !fits_octal(id.into(), 8) {
            record(&mut out, key.as_bytes(), id.to_string().as_bytes());
        }
    }
    let mtime = member.mtime;
    if mtime.nsec != 0 || !u64::try_from(mtime.sec).is_ok_and(|sec| fits_octal(sec, 12)) {
        record(&mut out, b"mtime", time_text(mtime).as_bytes());
    }
    if let Some(atime) = member.atime {
        record(&mut out, b"atime", time_text(atime).as_bytes());
    }
    for (name, value) in &member.xattrs {
        let key = match &name[..] {
            acl::ACCESS => Some("SCHILY.acl.access"),
            acl::DEFAULT => Some("SCHILY.acl.default"),
            _ => None,
        };
        if let (Some(key), Some(text)) = (key, acl::to_text(value)) {
            record(&mut out, key.as_bytes(), text.as_bytes());
            continue;
        }
        record(&mut out, &[b"SCHILY.xattr.", &keyword(name)[..]].concat(), value);
    }
    if sparse {
        record(&mut out, b"GNU.sparse.major", b"1");
        record(&mut out, b"GNU.sparse.minor", b"0");
        record(&mut out, b"GNU.sparse.name", &member.path);
        record(&mut out, b"GNU.sparse.realsize", member.size.to_string().as_bytes());
    }
    out
}

/// Encodes an attribute's name for use in a key, as GNU tar does. `=` must be encoded, because a key ends at its first
/// `=`.
fn keyword(name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.len());
    for byte in name {
        match byte {
            b'%' => key.extend(b"%25"),
            b'=' => key.extend(b"%3D"),
            byte => key.push(*byte),
        }
    }
    key
}

/// Appends a record `LEN KEY=VALUE\n`; LEN counts the whole record.
fn record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    out.extend(len.to_string().as_bytes());
    out.push(b' ');
    out.extend(key);
    out.push(b'=');
    out.extend(value);
    out.push(b'\n');
}

/// Formats the map that precedes the data (pax sparse 1.0). If the file ends in a hole, the map ends with an empty
/// range at the file's size.
fn sparse_map(ranges: &[(u64, u64)], size: u64) -> Vec<u8> {
    let at_end = ranges.last().is_none_or(|(offset, len)| offset + len < size).then_some((size, 0));
    let mut map = format!("{}\n", ranges.len() + usize::from(at_end.is_some()));
    for (offset, len) in ranges.iter().copied().chain(at_end) {
        map.push_str(&format!("{offset}\n{len}\n"));
    }
    let mut map = map.into_bytes();
    map.resize(map.len() + padding(map.len() as u64), 0);
    map
}

fn time_text(time: Timespec) -> String {
    let nsec = time.nsec.min(999_999_999);
    let (sign, sec, nsec) = match time.sec {
        sec if sec < 0 && nsec > 0 => ("-", (sec + 1).unsigned_abs(), 1_000_000_000 - nsec),
        sec if sec < 0 => ("-", sec.unsigned_abs(), 0),
        sec => ("", sec.unsigned_abs(), nsec),
    };
    let text = format!("{sign}{sec}.{nsec:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

const ZEROS: [u8; BLOCK] = [0; BLOCK];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tar::input::ArchiveInput;
    use crate::tar::read::ArchiveReader;

    fn member(path: &[u8], kind: MemberKind) -> ArchiveMember {
        let mtime = Timespec { sec: 1_700_000_000, nsec: 123_456_789 };
        ArchiveMember {
            path: path.to_vec(),
            kind,
            link: Vec::new(),
            mode: 0o4755,
            uid: 1000,
            gid: 7,
            mtime,
            atime: None,
            major: 0,
            minor: 0,
            size: 0,
            sparse: None,
            xattrs: Vec::new(),
        }
    }

    #[test]
    fn written_members_read_back_equal() {
        let long = [b"d".repeat(90), b"e".repeat(90), b"f".repeat(200)].join(&b'/');
        let wide = [b"d".repeat(90), b"e".repeat(60), b"f".repeat(99)].join(&b'/');
        let mut members = vec![
            member(b"./", MemberKind::Dir),
            ArchiveMember { size: 3, ..member(b"file", MemberKind::File) },
            ArchiveMember { size: 3, ..member(&long, MemberKind::File) },
            ArchiveMember { size: 3, ..member(&wide, MemberKind::File) },
            ArchiveMember { size: 600, uid: u32::MAX - 1, gid: 1 << 21, ..member(b"\xff\xfe", MemberKind::File) },
            ArchiveMember { link: b"file".to_vec(), ..member(b"hard", MemberKind::HardLink) },
            ArchiveMember { link: b"t".repeat(4000), ..member(b"sym", MemberKind::Symlink) },
            ArchiveMember { major: 8, minor: 300, ..member(b"dev", MemberKind::BlockDevice) },
            ArchiveMember { major: 1, minor: 3, ..member(b"null", MemberKind::CharDevice) },
            member(b"fifo", MemberKind::Fifo),
            ArchiveMember {
                size: 1 << 40,
                sparse: Some(vec![(4096, 3), (1 << 39, 512)]),
                ..member(b"sparse", MemberKind::File)
            },
            ArchiveMember { size: 1 << 20, sparse: Some(vec![]), ..member(b"hole", MemberKind::File) },
            ArchiveMember { size: 8, sparse: Some(vec![(5, 3)]), ..member(&long, MemberKind::File) },
        ];
        for (index, sec) in [-1, 0, i64::from(u32::MAX), 1 << 34, -(1 << 40)].into_iter().enumerate() {
            members[index].mtime = Timespec { sec, nsec: [0, 1, 999_999_999][index % 3] };
            members[index].atime = Some(Timespec { sec: sec / 2, nsec: 5 });
            let value = (0..=255).cycle().take(1 << (index * 3)).collect();
            members[index].xattrs = vec![(b"user.a=b%3D%\n".to_vec(), value), (b"user.empty".to_vec(), Vec::new())];
        }
        let mut writer = ArchiveWriter::new(Vec::new());
        for member in &members {
            writer.begin(member).unwrap();
            writer.data(&b"x".repeat(member.data_bytes() as usize)).unwrap();
            writer.end().unwrap();
        }
        let archive = writer.finish().unwrap();
        let inputs = [|bytes: &[u8]| ArchiveInput::of(bytes.to_vec()), ArchiveInput::of_file];
        for (skip, input) in [(false, inputs[0]), (true, inputs[0]), (false, inputs[1]), (true, inputs[1])] {
            let mut reader = ArchiveReader::new(input(&archive).unwrap());
            for member in &members {
                let found = reader.next_member().unwrap().unwrap();
                assert_eq!(found, *member);
                let mut len = 0;
                if !skip {
                    reader
                        .for_each_piece(member, |_, bytes| {
                            len += bytes.len() as u64;
                            assert!(bytes.iter().all(|byte| *byte == b'x'));
                            Ok(())
                        })
                        .unwrap();
                    assert_eq!(len, member.data_bytes());
                }
            }
            assert!(reader.next_member().unwrap().is_none());
        }
        // Reading an archive that was cut off never panics.
        for len in (0..archive.len()).step_by(100) {
            for input in inputs {
                let mut reader = ArchiveReader::new(input(&archive[..len]).unwrap());
                while let Ok(Some(member)) = reader.next_member() {
                    if reader.for_each_piece(&member, |_, _| Ok(())).is_err() {
                        break;
                    }
                }
            }
        }
    }
}
