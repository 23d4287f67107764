//! Reads an archive member by member.
//!
//! Invariants:
//! - I1. `data_left` is the number of bytes of the current member's data that have not been read yet. `padding_left`
//!   bytes of padding follow this data.
//! - I2. The headers and records of one member take at most `META_MAX` bytes of memory together, and the global records
//!   at most `GLOBAL_MAX`. Nothing in an archive causes a panic.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use ubtrfs_format::item::Timespec;

use super::header::MemberHeader;
use super::input::ArchiveInput;
use super::{ArchiveMember, BLOCK, MemberKind, acl, padding};
use crate::walk::printable;

/// The members of an archive, in order.
pub(crate) struct ArchiveReader {
    input: ArchiveInput,
    /// Records of pax's global headers.
    global: PaxRecords,
    data_left: u64,
    padding_left: usize,
    nr_members: u64,
    /// Memory that the current member's headers may still take (I2).
    meta_left: usize,
    /// Memory that the global records may still take (I2).
    global_left: usize,
}

type PaxRecords = BTreeMap<Vec<u8>, Vec<u8>>;

/// Records that precede a member's header.
#[derive(Default)]
struct Extras {
    records: PaxRecords,
    /// Values of the repeated records `GNU.sparse.offset` and `GNU.sparse.numbytes` (pax sparse 0.0).
    sparse: Vec<u64>,
    long_path: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl ArchiveReader {
    pub(crate) fn new(input: ArchiveInput) -> Self {
        Self {
            input,
            global: PaxRecords::new(),
            data_left: 0,
            padding_left: 0,
            nr_members: 0,
            meta_left: META_MAX,
            global_left: GLOBAL_MAX,
        }
    }

    /// Returns the input of this reader.
    pub(crate) fn input(&self) -> &ArchiveInput {
        &self.input
    }

    /// Returns the next member; skips unread data of the previous member.
    pub(crate) fn next_member(&mut self) -> anyhow::Result<Option<ArchiveMember>> {
        self.skip_rest()?;
        self.meta_left = META_MAX;
        let mut extras = Extras::default();
        let mut block = [0; BLOCK];
        loop {
            if !self.input.read_block(&mut block).map_err(|error| self.broken(error))? {
                if self.nr_members == 0 {
                    bail!("the archive is empty; give a tar archive");
                }
                // Some writers omit the zero blocks at the end of an archive, so an archive without them is accepted.
                return Ok(None);
            }
            let header = MemberHeader(&block);
            if header.is_zero() {
                self.input.drain().map_err(|error| self.broken(error))?;
                return Ok(None);
            }
            if !header.checksum_matches() {
                if self.nr_members == 0 {
                    bail!("not a tar archive; give a tar file: plain, or compressed with gzip, xz or zstd");
                }
                bail!("the archive is damaged after member {}: wrong header checksum", self.nr_members);
            }
            let size = number(&header, 124, 12, "size")?;
            let size = u64::try_from(size).ok().context("the archive is damaged: negative size")?;
            match block[156] {
                b'x' | b'X' => {
                    let data = self.read_meta(size)?;
                    parse_records(&data, &mut extras, &mut self.meta_left)?;
                }
                b'g' => {
                    let data = self.read_meta(size)?;
                    let mut global = Extras::default();
                    parse_records(&data, &mut global, &mut self.global_left)?;
                    self.global.append(&mut global.records);
                    drop_canceled(&mut self.global);
                }
                b'L' => extras.long_path = Some(until_zero(self.read_meta(size)?)),
                b'K' => extras.long_link = Some(until_zero(self.read_meta(size)?)),
                b'V' | b'N' => self.pass_over(size)?,
                b'M' => bail!("multi-volume archives are not supported; join the volumes first"),
                _ => {
                    self.nr_members += 1;
                    return self.member(&block, size, extras).map(Some);
                }
            }
        }
    }

    /// Reads the data of `member`, which was returned last, and calls `piece` with each piece and its offset in the
    /// file.
    pub(crate) fn for_each_piece(
        &mut self,
        member: &ArchiveMember,
        mut piece: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for (mut offset, len) in member.data_ranges() {
            let mut left = len;
            while left > 0 {
                let want = left.min(self.data_left);
                let bytes = match want {
                    0 => Ok(&[][..]),
                    _ => self.input.next_piece(want),
                };
                let bytes = match bytes {
                    Ok(bytes) if !bytes.is_empty() => bytes,
                    Ok(_) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, DATA_CUT_OFF).into()),
                    Err(error) => {
                        return Err(error).context("its data cannot be read");
                    }
                };
                let count = bytes.len() as u64;
                // The bytes count as read even if `piece` fails, because the next member begins after the data.
                self.data_left -= count;
                piece(offset, bytes)?;
                left -= count;
                offset += count;
            }
        }
        Ok(())
    }

    /// Returns the file and the offset of the member's data in it, if the archive is not compressed. In the archive
    /// file, the data ranges of a member follow each other without gaps, so other code can read them without this
    /// reader.
    pub(crate) fn place_of_data(&self) -> Option<(Arc<File>, u64)> {
        self.input.place()
    }

    fn member(&mut self, block: &[u8; BLOCK], size: u64, mut extras: Extras) -> anyhow::Result<ArchiveMember> {
        let header = MemberHeader(block);
        for (key, value) in &self.global {
            if !extras.records.contains_key(key) {
                extras.records.insert(key.clone(), value.clone());
            }
        }
        drop_canceled(&mut extras.records);
        let (long_path, long_link) = (extras.long_path.take(), extras.long_link.take());
        let records = &extras.records;
        let get = |key: &str| records.get(key.as_bytes());
        let path = get("path").cloned().or(long_path).unwrap_or_else(|| header.path());
        let link = get("linkpath").cloned().or(long_link).unwrap_or_else(|| header.text(157, 100).to_vec());
        let at = || printable(&path);
        let decimal = |key: &str| match get(key) {
            Some(value) => parse_decimal(value).map(Some).with_context(|| format!("{}: wrong {key}", at())),
            None => Ok(None),
        };
        let time = |key: &str| match get(key) {
            Some(value) => parse_time(value).map(Some).with_context(|| format!("{}: wrong {key}", at())),
            None => Ok(None),
        };
        let id = |key: &str, offset: usize| -> anyhow::Result<u32> {
            let value = match decimal(key)? {
                Some(value) => i64::try_from(value).unwrap_or(i64::MAX),
                None => number(&header, offset, 8, key)?,
            };
            u32::try_from(value).ok().with_context(|| format!("{}: {key} {value} is too large for btrfs", at()))
        };
        let part = |offset: usize| number(&header, offset, 8, "device").map(|value| u32::try_from(value).unwrap_or(0));
        let mut kind = match block[156] {
            b'1' => MemberKind::HardLink,
            b'2' => MemberKind::Symlink,
            b'3' => MemberKind::CharDevice,
            b'4' => MemberKind::BlockDevice,
            b'5' | b'D' => MemberKind::Dir,
            b'6' => MemberKind::Fifo,
            // POSIX says to treat unknown types as files.
            _ => MemberKind::File,
        };
        if kind == MemberKind::File && path.ends_with(b"/") && matches!(block[156], 0 | b'0') {
            kind = MemberKind::Dir;
        }
        let stored = decimal("size")?.unwrap_or(size);
        let has_data = matches!(kind, MemberKind::File | MemberKind::HardLink) || block[156] == b'D';
        self.data_left = if has_data { stored } else { 0 };
        self.padding_left = padding(self.data_left);
        let mut member = ArchiveMember {
            kind,
            link,
            mode: u32::try_from(number(&header, 100, 8, "mode")? & 0o7777).unwrap_or_default(),
            uid: id("uid", 108)?,
            gid: id("gid", 116)?,
            mtime: match time("mtime")? {
                Some(time) => time,
                None => Timespec { sec: number(&header, 136, 12, "mtime")?, nsec: 0 },
            },
            atime: time("atime")?,
            major: part(329)?,
            minor: part(337)?,
            size: if kind == MemberKind::File { stored } else { 0 },
            sparse: None,
            xattrs: xattrs(records).with_context(at)?,
            path: path.clone(),
        };
        if kind == MemberKind::File {
            self.read_sparse(&header, &extras, &mut member).with_context(at)?;
        }
        if member.path.len() > PATH_MAX || member.link.len() > PATH_MAX {
            bail!("the archive has a path of more than {PATH_MAX} bytes, which this command cannot unpack");
        }
        Ok(member)
    }

    /// If the member is a sparse file, reads the map of its data, in any of the four formats (GNU; pax 0.0, 0.1, 1.0).
    fn read_sparse(
        &mut self,
        header: &MemberHeader<'_>,
        extras: &Extras,
        member: &mut ArchiveMember,
    ) -> anyhow::Result<()> {
        let get = |key: &str| extras.records.get(key.as_bytes());
        let decimal = |key: &str| get(key).map(|value| parse_decimal(value)).transpose();
        let map = if header.0[156] == b'S' && header.is_gnu() {
            member.size = u64::try_from(number(header, 483, 12, "real size")?).context("negative size")?;
            self.read_gnu_map(header)?
        } else if get("GNU.sparse.major").is_some_and(|major| major == b"1") {
            member.size = decimal("GNU.sparse.realsize")?.context("no GNU.sparse.realsize")?;
            self.read_data_map()?
        } else if let Some(list) = get("GNU.sparse.map") {
            member.size = decimal("GNU.sparse.size")?.context("no GNU.sparse.size")?;
            charge(&mut self.meta_left, list.len().saturating_mul(SPARSE_NUMBER))?;
            list.split(|byte| *byte == b',').map(parse_decimal).collect::<Result<_, _>>()?
        } else if get("GNU.sparse.size").is_some() {
            member.size = decimal("GNU.sparse.size")?.context("no GNU.sparse.size")?;
            extras.sparse.clone()
        } else {
            return Ok(());
        };
        if let Some(name) = get("GNU.sparse.name") {
            member.path.clone_from(name);
        }
        let mut ranges = Vec::with_capacity(map.len() / 2);
        let (mut end, mut total) = (0u64, 0u64);
        for pair in map.chunks(2) {
            let &[offset, len] = pair else { bail!("the sparse map has an odd length") };
            if offset < end || offset.checked_add(len).is_none_or(|end| end > member.size) {
                bail!("the sparse map is out of order or goes past the file's end");
            }
            end = offset + len;
            total += len;
            if len > 0 {
                ranges.push((offset, len));
            }
        }
        if total > self.data_left {
            bail!("the sparse map has {total} bytes, but the archive has {}", self.data_left);
        }
        member.sparse = Some(ranges);
        Ok(())
    }

    /// Reads GNU's sparse map: 4 pairs in the header, 21 in each block after it.
    fn read_gnu_map(&mut self, header: &MemberHeader<'_>) -> anyhow::Result<Vec<u64>> {
        let mut map = Vec::new();
        let mut take = |header: &MemberHeader<'_>, first: usize, count: usize| -> anyhow::Result<()> {
            for at in (0..count).map(|index| first + index * 24) {
                if header.bytes(at, 1)[0] == 0 {
                    break;
                }
                for at in [at, at + 12] {
                    let value = number(header, at, 12, "sparse map")?;
                    map.push(u64::try_from(value).context("negative number in the sparse map")?);
                }
            }
            Ok(())
        };
        take(header, 386, 4)?;
        let mut extended = header.0[482] != 0;
        while extended {
            let mut block = [0; BLOCK];
            charge(&mut self.meta_left, 2 * BLOCK)?;
            if !self.input.read_block(&mut block)? {
                bail!("the sparse map does not end");
            }
            take(&MemberHeader(&block), 0, 21)?;
            extended = block[504] != 0;
        }
        Ok(map)
    }

    /// Reads the map of pax sparse 1.0: decimal numbers in lines before the data, padded to a block.
    fn read_data_map(&mut self) -> anyhow::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        let (mut value, mut nr_digits) = (0u64, 0);
        // The first number is the count of pairs.
        let wanted = |numbers: &[u64]| numbers.first().map_or(1, |count| count.saturating_mul(2).saturating_add(1));
        while (numbers.len() as u64) < wanted(&numbers) {
            let mut block = [0; BLOCK];
            charge(&mut self.meta_left, BLOCK)?;
            if self.data_left < BLOCK as u64 || !self.input.read_block(&mut block)? {
                bail!("the sparse map does not end");
            }
            self.data_left -= BLOCK as u64;
            for byte in block {
                if numbers.len() as u64 >= wanted(&numbers) {
                    break;
                }
                match byte {
                    b'0'..=b'9' => {
                        let next = value.checked_mul(10).and_then(|value| value.checked_add(u64::from(byte - b'0')));
                        value = next.context("number too large in the sparse map")?;
                        nr_digits += 1;
                    }
                    b'\n' if nr_digits > 0 => {
                        charge(&mut self.meta_left, SPARSE_NUMBER)?;
                        numbers.push(value);
                        (value, nr_digits) = (0, 0);
                    }
                    _ => bail!("the sparse map contains something other than numbers"),
                }
            }
        }
        numbers.remove(0);
        Ok(numbers)
    }

    fn skip_rest(&mut self) -> anyhow::Result<()> {
        let rest = self.data_left.saturating_add(self.padding_left as u64);
        (self.data_left, self.padding_left) = (0, 0);
        self.input.skip(rest).map_err(|error| self.broken(error))
    }

    fn pass_over(&mut self, size: u64) -> anyhow::Result<()> {
        let len = size.checked_add(padding(size) as u64).context("the archive is damaged: impossible size")?;
        self.input.skip(len).map_err(|error| self.broken(error))
    }

    /// Reads the data that follows a header of pax records, or of GNU tar's long path or link.
    fn read_meta(&mut self, size: u64) -> anyhow::Result<Vec<u8>> {
        charge(&mut self.meta_left, usize::try_from(size).unwrap_or(usize::MAX))?;
        let mut data = Vec::new();
        while (data.len() as u64) < size {
            let piece = self.input.next_piece(size - data.len() as u64);
            let piece = piece.context("the rest of the archive cannot be read")?;
            if piece.is_empty() {
                return Err(self.broken(std::io::ErrorKind::UnexpectedEof.into()));
            }
            data.extend_from_slice(piece);
        }
        self.input.skip(padding(size) as u64).map_err(|error| self.broken(error))?;
        Ok(data)
    }

    fn broken(&self, error: std::io::Error) -> anyhow::Error {
        if error.kind() == std::io::ErrorKind::UnexpectedEof {
            return anyhow!("the archive is cut off after member {}; download or copy it again", self.nr_members);
        }
        if error.to_string().contains("memory") {
            // zstd and xz return this error if the memory limit is too low.
            let what = "it takes more memory to decompress than is allowed here";
            return anyhow!("{what}; use a pipe: zstd -dc --long=31 FILE | ubtrfs import - IMAGE:/");
        }
        anyhow::Error::new(error).context(format!("the archive cannot be read after member {}", self.nr_members))
    }
}

fn number(header: &MemberHeader<'_>, at: usize, len: usize, what: &str) -> anyhow::Result<i64> {
    header.number(at, len).with_context(|| format!("{}: wrong {what} in the archive", printable(&header.path())))
}

fn until_zero(mut data: Vec<u8>) -> Vec<u8> {
    let len = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    data.truncate(len);
    data
}

/// Subtracts `bytes` from `left`, the memory that may still be used (I2).
fn charge(left: &mut usize, bytes: usize) -> anyhow::Result<()> {
    *left = left.checked_sub(bytes).context("the archive is damaged: its headers take too much memory")?;
    Ok(())
}

/// Parses pax records, `LEN KEY=VALUE\n`; LEN counts the whole record. An empty value cancels earlier records with its key
/// ([`drop_canceled`]).
fn parse_records(data: &[u8], extras: &mut Extras, left: &mut usize) -> anyhow::Result<()> {
    let mut rest = data;
    // Zeros may pad the end of the records.
    while rest.first().is_some_and(|byte| *byte != 0) {
        let record = (|| {
            let space = rest.iter().take(20).position(|byte| *byte == b' ')?;
            let len = usize::try_from(parse_decimal(&rest[..space]).ok()?).ok()?;
            let record = rest.get(space + 1..len)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|byte| *byte == b'=')?;
            Some((len, &record[..equals], &record[equals + 1..]))
        })();
        let Some((len, key, value)) = record else { bail!("the archive is damaged: wrong pax record") };
        charge(left, key.len() + value.len() + RECORD_OVERHEAD)?;
        match key {
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => extras.sparse.push(parse_decimal(value)?),
            _ => drop(extras.records.insert(key.to_vec(), value.to_vec())),
        }
        rest = &rest[len..];
    }
    Ok(())
}

/// Drops the empty records. They have canceled earlier records with their keys. Only an extended attribute may be empty.
fn drop_canceled(records: &mut PaxRecords) {
    records.retain(|key, value| !value.is_empty() || key.starts_with(XATTR_PREFIX));
}

fn xattrs(records: &PaxRecords) -> anyhow::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut xattrs = Vec::new();
    for (key, value) in records {
        let text_acl = match &key[..] {
            b"SCHILY.acl.access" => Some(acl::ACCESS),
            b"SCHILY.acl.default" => Some(acl::DEFAULT),
            _ => None,
        };
        if let Some(name) = key.strip_prefix(XATTR_PREFIX) {
            xattrs.push((decode_keyword(name), value.clone()));
        } else if let Some(name) = text_acl.filter(|name| !records.contains_key(&[XATTR_PREFIX, name].concat())) {
            xattrs.push((name.to_vec(), acl::from_text(value)?));
        }
    }
    Ok(xattrs)
}

/// Decodes the name of an attribute in a key. GNU tar writes `%` and `=` of the name as `%25` and `%3D`.
fn decode_keyword(key: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(key.len());
    let mut rest = key;
    while let Some(byte) = rest.first() {
        let (byte, len) = match rest {
            [b'%', b'2', b'5', ..] => (b'%', 3),
            [b'%', b'3', b'D' | b'd', ..] => (b'=', 3),
            _ => (*byte, 1),
        };
        name.push(byte);
        rest = &rest[len..];
    }
    name
}

fn parse_decimal(text: &[u8]) -> anyhow::Result<u64> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .with_context(|| format!("'{}' is not a number", printable(text)))
}

/// Parses `[-]SECONDS[.FRACTION]`.
fn parse_time(text: &[u8]) -> anyhow::Result<Timespec> {
    let parsed = (|| {
        let text = std::str::from_utf8(text).ok()?;
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let sec: i64 = whole.parse().ok()?;
        let mut nsec = 0u32;
        for index in 0..9 {
            let digit = fraction.as_bytes().get(index).copied().unwrap_or(b'0');
            nsec = nsec * 10 + u32::from(digit.checked_sub(b'0').filter(|digit| *digit < 10)?);
        }
        // -1.25 is 1.25 seconds before 1970.
        if text.starts_with('-') && nsec > 0 {
            return Some(Timespec { sec: sec.checked_sub(1)?, nsec: 1_000_000_000 - nsec });
        }
        Some(Timespec { sec, nsec })
    })();
    parsed.with_context(|| format!("'{}' is not a time", printable(text)))
}

/// The message for an archive that ends too early.
pub(crate) const DATA_CUT_OFF: &str = "the archive ends within its data; download or copy it again";
const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
/// Limit in bytes for the headers of one member, large enough for many attributes of 64 KiB each.
const META_MAX: usize = 64 << 20;
/// Limit in bytes for the global records. The limit is low, because each member gets a copy of all global records.
const GLOBAL_MAX: usize = 64 << 10;
/// Longest path that Linux accepts.
const PATH_MAX: usize = 4096;
/// The memory that a record takes in addition to its bytes.
const RECORD_OVERHEAD: usize = 128;
/// The memory charged for each number of a sparse map: enough for the number itself and for all data that is computed
/// from it.
const SPARSE_NUMBER: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions_and_may_lie_before_1970() {
        let time = |text: &str| parse_time(text.as_bytes()).map(|time| (time.sec, time.nsec)).ok();
        assert_eq!(time("12"), Some((12, 0)));
        assert_eq!(time("12.5"), Some((12, 500_000_000)));
        assert_eq!(time("12.1234567899"), Some((12, 123_456_789)));
        assert_eq!(time("-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time("-0.5"), Some((-1, 500_000_000)));
        assert_eq!(time("x"), None);
        assert_eq!(time("1.x"), None);
    }

    #[test]
    fn broken_archives_are_errors() {
        let mut archive = vec![0u8; BLOCK];
        archive[0] = b'a';
        for input in [|bytes: &[u8]| ArchiveInput::of(bytes.to_vec()), ArchiveInput::of_file] {
            let read = |bytes: &[u8]| ArchiveReader::new(input(bytes).unwrap()).next_member();
            assert!(read(&archive).unwrap_err().to_string().contains("not a tar archive"));
            assert!(read(b"").unwrap_err().to_string().contains("empty"));
            assert!(read(b"short").unwrap_err().to_string().contains("cut off"));
            assert!(read(&[0; 1024]).unwrap().is_none());
        }
    }

    #[test]
    fn broken_records_are_errors() {
        for text in ["", "x", "5 a=", "99 a=b\n", "6 a=b", "-1 a=b\n", "0 a=b\n", "18446744073709551615 a=b\n"] {
            let parsed = parse_records(text.as_bytes(), &mut Extras::default(), &mut { META_MAX });
            assert_eq!(parsed.is_ok(), text.is_empty(), "{text}");
        }
        let mut extras = Extras::default();
        parse_records(b"6 a=b\n9 c==d\ne\n", &mut extras, &mut { META_MAX }).unwrap();
        assert_eq!(extras.records[&b"c"[..]], b"=d\ne");
    }

    /// A header block of an entry, with an empty link, and the entry's data.
    fn entry(kind: u8, name: &str, data: &[u8]) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        block[..name.len()].copy_from_slice(name.as_bytes());
        for (at, text) in [(100, "0000644\0"), (108, "0000007\0"), (116, "0000007\0"), (136, "00000000005\0")] {
            block[at..at + text.len()].copy_from_slice(text.as_bytes());
        }
        block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
        block[148..156].fill(b' ');
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block.extend_from_slice(data);
        block.resize(block.len().next_multiple_of(BLOCK), 0);
        block
    }

    #[test]
    fn an_empty_value_cancels_earlier_and_global_records() {
        const ID: &str = "10 uid=99\n";
        let archive = [
            entry(b'g', "global", format!("{ID}10 gid=98\n").as_bytes()),
            entry(b'0', "global-values", b""),
            entry(b'x', "local", b"7 uid=\n"),
            entry(b'0', "empty-here", b""),
            entry(b'0', "global-values-again", b""),
            entry(b'x', "local", ID.as_bytes()),
            entry(b'x', "local", b"7 uid=\n"),
            entry(b'0', "value-and-empty", b""),
            entry(b'g', "global", b"7 uid=\n"),
            entry(b'0', "global-canceled", b""),
            entry(b'x', "local", ID.as_bytes()),
            entry(b'0', "value-here", b""),
        ];
        let mut reader = ArchiveReader::new(ArchiveInput::of(archive.concat()).unwrap());
        let mut found = Vec::new();
        while let Some(member) = reader.next_member().unwrap() {
            found.push((String::from_utf8(member.path).unwrap(), member.uid, member.gid));
        }
        let expected = [
            ("global-values", 99),
            ("empty-here", 7),
            ("global-values-again", 99),
            ("value-and-empty", 7),
            ("global-canceled", 7),
            ("value-here", 99),
        ];
        assert_eq!(found, expected.map(|(name, uid)| (name.to_owned(), uid, 98)));
    }
}
