//! Whiteouts of OCI image layers (image-spec, "Layer Filesystem Changeset").
//!
//! | name | meaning |
//! |---|---|
//! | `.wh.NAME` | hides `NAME` of the layers below |
//! | `.wh..wh..opq` | hides all content of the directory in the layers below       |
//! | `.wh..wh.*` | ignored: used internally by AUFS |
//!
//! I1. A whiteout removes only files that existed before this layer, and never files that the layer added; the order of
//!     the members makes no difference.

use std::collections::HashSet;

use anyhow::{Context, bail};
use ubtrfs_fs::{Error, Fs, InodeId};

use crate::walk::{DirName, VisitedDirs, printable, read_names};

/// The names that a layer has added so far.
#[derive(Default)]
pub(super) struct Layer {
    names: HashSet<(InodeId, Box<[u8]>)>,
}

/// The effect of a whiteout on the layers below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whiteout<'n> {
    Name(&'n [u8]),
    Opaque,
    Ignored,
}

/// Recognizes whiteouts by name.
pub(super) fn whiteout_of(name: &[u8]) -> anyhow::Result<Option<Whiteout<'_>>> {
    let Some(hidden) = name.strip_prefix(PREFIX) else { return Ok(None) };
    Ok(Some(match hidden {
        b".wh..opq" => Whiteout::Opaque,
        hidden if hidden.starts_with(PREFIX) => Whiteout::Ignored,
        b"" | b"." | b".." => bail!("the whiteout '{}' names nothing", printable(name)),
        hidden => Whiteout::Name(hidden),
    }))
}

/// Whether a walk keeps or removes files that come from the layers below.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LowerFiles {
    Stays,
    Goes,
}

impl Layer {
    /// The approximate number of bytes of memory that a recorded name takes.
    pub(super) fn memory_bytes(name: &[u8]) -> usize {
        2 * size_of::<(InodeId, Box<[u8]>)>() + name.len() + 16
    }

    /// Records that the layer adds this name.
    pub(super) fn note(&mut self, dir: InodeId, name: &[u8]) {
        self.names.insert((dir, name.into()));
    }

    fn has(&self, dir: InodeId, name: &[u8]) -> bool {
        self.names.contains(&(dir, name.into()))
    }

    /// Applies a whiteout in a directory.
    pub(super) fn apply(&self, fs: &Fs, dir: InodeId, whiteout: Whiteout<'_>) -> anyhow::Result<()> {
        match whiteout {
            Whiteout::Ignored => Ok(()),
            Whiteout::Opaque => self.remove_lower(fs, dir).map(drop),
            Whiteout::Name(name) => match fs.lookup(dir, name) {
                Err(Error::NotFound) => Ok(()),
                Err(error) => Err(error.into()),
                Ok(attr) if attr.is_dir() => {
                    if self.remove_lower(fs, attr.id)? && !self.has(dir, name) {
                        fs.rmdir(dir, name)?;
                    }
                    Ok(())
                }
                Ok(_) if self.has(dir, name) => Ok(()),
                Ok(_) => Ok(fs.unlink(dir, name)?),
            },
        }
    }

    /// Fails if a directory contains anything that this layer added. Does not remove anything.
    pub(super) fn check_replaceable(&self, fs: &Fs, dir: InodeId) -> anyhow::Result<()> {
        if !self.walk_lower(fs, dir, LowerFiles::Stays)? {
            bail!("the layer has a directory and another file of that name");
        }
        Ok(())
    }

    /// Removes a directory that comes from the layers below, because this layer replaces it.
    pub(super) fn remove_dir(&self, fs: &Fs, parent: InodeId, name: &[u8]) -> anyhow::Result<()> {
        let dir = fs.lookup(parent, name)?;
        self.check_replaceable(fs, dir.id)?;
        self.remove_lower(fs, dir.id)?;
        Ok(fs.rmdir(parent, name)?)
    }

    /// Removes everything in a directory that this layer did not add. Returns whether the directory is empty
    /// afterwards.
    fn remove_lower(&self, fs: &Fs, dir: InodeId) -> anyhow::Result<bool> {
        self.walk_lower(fs, dir, LowerFiles::Goes)
    }

    /// Walks through a directory, and with [`LowerFiles::Goes`] removes everything that this layer did not add. Returns
    /// whether the directory contains nothing that this layer added. The depth is limited by memory, not by the stack.
    fn walk_lower(&self, fs: &Fs, dir: InodeId, old: LowerFiles) -> anyhow::Result<bool> {
        struct LayerDir {
            id: InodeId,
            left: Vec<DirName>,
            /// Parent and name of the directory; `None` for the directory where the walk began.
            place: Option<(InodeId, Vec<u8>)>,
            is_kept: bool,
        }
        let mut passed = VisitedDirs::default();
        let mut open = |id: InodeId, place: Option<(InodeId, Vec<u8>)>| -> anyhow::Result<LayerDir> {
            passed.pass(id)?;
            let is_kept = place.as_ref().is_some_and(|(dir, name)| self.has(*dir, name));
            Ok(LayerDir { id, left: read_names(fs, id)?, place, is_kept })
        };
        let mut levels = vec![open(dir, None)?];
        loop {
            let level = levels.last_mut().context("the walk ends at its start")?;
            let id = level.id;
            if let Some(entry) = level.left.pop() {
                let here = || printable(&entry.name);
                if fs.getattr(entry.id).with_context(here)?.is_dir() {
                    let next = open(entry.id, Some((id, entry.name.clone()))).with_context(here)?;
                    levels.push(next);
                } else if self.has(id, &entry.name) {
                    level.is_kept = true;
                } else if old == LowerFiles::Goes {
                    fs.unlink(id, &entry.name).with_context(here)?;
                }
                continue;
            }
            let is_kept = level.is_kept;
            let place = level.place.take();
            levels.pop();
            let Some((parent, name)) = place else { return Ok(!is_kept) };
            match levels.last_mut() {
                Some(above) if is_kept => above.is_kept = true,
                _ if old == LowerFiles::Stays => {}
                _ => fs.rmdir(parent, &name).with_context(|| printable(&name))?,
            }
        }
    }
}

const PREFIX: &[u8] = b".wh.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whiteouts_are_known_by_their_names() {
        assert_eq!(whiteout_of(b"file").unwrap(), None);
        assert_eq!(whiteout_of(b".wh.file").unwrap(), Some(Whiteout::Name(b"file")));
        assert_eq!(whiteout_of(b".wh..wh..opq").unwrap(), Some(Whiteout::Opaque));
        assert_eq!(whiteout_of(b".wh..wh.plnk").unwrap(), Some(Whiteout::Ignored));
        for wrong in [&b".wh."[..], b".wh..", b".wh..."] {
            whiteout_of(wrong).unwrap_err();
        }
    }
}
