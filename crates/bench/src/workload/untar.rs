//! untar: unpacks an archive with the calls and write sizes of tar.
//!
//! - U1. Content is written in pieces of [`WRITE_LEN`], the record size of GNU tar, so that a mount gets the requests
//!   that tar would make.
//! - U2. Times of directories are set at the end, after the last change in them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};

use anyhow::{Context, Result, bail};
use tar::EntryType;

use super::Params;
use crate::record::MeasuredWork;
use crate::target::{BenchTarget, EntryKind, Meta};

/// GNU tar's record: 20 blocks of 512 bytes.
const WRITE_LEN: usize = 10_240;

struct Untar<'a, T: BenchTarget> {
    target: &'a T,
    /// Directories by their path in the archive.
    dirs: HashMap<Vec<u8>, T::Dir>,
    /// Directory metadata to set at the end: parent, name, metadata (U2).
    dir_metas: Vec<(T::Dir, Vec<u8>, Meta)>,
    work: MeasuredWork,
}

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let path = params.tar.as_ref().context("no archive was given; use --tar FILE")?;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut archive = tar::Archive::new(BufReader::with_capacity(1 << 20, file));
    let dirs = HashMap::from([(Vec::new(), base.clone())]);
    let mut untar = Untar { target, dirs, dir_metas: Vec::new(), work: MeasuredWork::new() };
    let mut buf = vec![0; WRITE_LEN];
    for entry in archive.entries()? {
        let mut entry = entry.with_context(|| format!("cannot read {}", path.display()))?;
        untar.member(&mut entry, &mut buf)?;
    }
    for (dir, name, meta) in &untar.dir_metas {
        target.set_meta_at(dir, name, meta, EntryKind::Dir)?;
    }
    Ok(untar.work)
}

/// Splits a member's path into names. Fails if the path leads out of the target.
fn names(path: &[u8]) -> Result<Vec<&[u8]>> {
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.contains(&&b".."[..]) {
        bail!("the archive has a path with '..': {}", String::from_utf8_lossy(path));
    }
    Ok(names)
}

impl<T: BenchTarget> Untar<'_, T> {
    /// Returns the directory whose path in the archive consists of `names`. Makes missing directories.
    fn parent(&mut self, names: &[&[u8]]) -> Result<T::Dir> {
        let path = names.join(&b'/');
        if let Some(dir) = self.dirs.get(&path) {
            return Ok(dir.clone());
        }
        let (last, above) = names.split_last().context("the empty path is always known")?;
        let parent = self.parent(above)?;
        let dir = self.target.mkdir(&parent, last, 0o755)?;
        self.dirs.insert(path, dir.clone());
        Ok(dir)
    }

    fn member(&mut self, entry: &mut tar::Entry<'_, impl Read>, buf: &mut [u8]) -> Result<()> {
        let header = entry.header();
        let kind = header.entry_type();
        let meta = Meta {
            mode: header.mode()? & 0o7777,
            uid: u32::try_from(header.uid()?).unwrap_or_default(),
            gid: u32::try_from(header.gid()?).unwrap_or_default(),
            mtime: i64::try_from(header.mtime()?).unwrap_or_default(),
        };
        let path = entry.path_bytes().into_owned();
        let names = names(&path)?;
        let Some((name, above)) = names.split_last() else { return Ok(()) };
        let link = entry.link_name_bytes().map(|link| link.into_owned());
        let dir = self.parent(above)?;
        let started = std::time::Instant::now();
        match kind {
            EntryType::Directory => {
                let full = names.join(&b'/');
                if !self.dirs.contains_key(&full) {
                    let made = self.target.mkdir(&dir, name, meta.mode)?;
                    self.dirs.insert(full, made);
                }
                self.dir_metas.push((dir, name.to_vec(), meta));
            }
            EntryType::Symlink => {
                self.target.symlink(&dir, name, &link.context("a symbolic link without a target")?)?;
                self.target.set_meta_at(&dir, name, &meta, EntryKind::Other)?;
            }
            EntryType::Link => {
                let link = link.context("a hard link without a target")?;
                let old = self::names(&link)?;
                let (old_name, old_above) = old.split_last().context("a hard link to nothing")?;
                let old_dir = self.parent(old_above)?;
                self.target.link((&old_dir, old_name), (&dir, name))?;
            }
            EntryType::Regular | EntryType::Continuous => self.file(entry, &dir, name, &meta, buf)?,
            // Skip comments and devices, which do not matter for speed.
            _ => return Ok(()),
        }
        self.work.latencies.note(started.elapsed());
        self.work.ops += 1;
        Ok(())
    }

    fn file(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        dir: &T::Dir,
        name: &[u8],
        meta: &Meta,
        buf: &mut [u8],
    ) -> Result<()> {
        let file = self.target.create(dir, name, meta.mode & 0o700)?;
        let mut offset = 0;
        loop {
            let count = read_full(entry, buf)?;
            if count == 0 {
                break;
            }
            self.target.write(&file, offset, &buf[..count])?;
            offset += count as u64;
        }
        self.work.bytes += offset;
        self.target.set_meta(&file, meta)
    }
}

fn read_full(from: &mut impl Read, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match from.read(&mut buf[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}
