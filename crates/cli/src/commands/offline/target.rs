//! The targets of commands that give names: `mv` and `ln`.

use anyhow::{Context, bail};
use ubtrfs_fs::{Error, Fs, InodeId};

use super::text::printable;
use super::{ImagePath, child_path, lookup_parent};

/// The place that the last operand of `mv` or `ln` names: a directory that takes the files, or a new name.
pub(super) enum OperandTarget<'t> {
    /// The directory.
    Dir(InodeId),
    /// The directory of the name, and the name.
    Name(InodeId, &'t [u8]),
}

impl<'t> OperandTarget<'t> {
    /// Finds the place. With `is_name`, a directory is taken as the name of a file.
    pub(super) fn find(fs: &Fs, at: &'t ImagePath, follow: bool, is_name: bool) -> anyhow::Result<Self> {
        if !is_name {
            match fs.lookup_path(&at.path, follow) {
                Ok(attr) if attr.is_dir() => return Ok(Self::Dir(attr.id)),
                Ok(_) | Err(Error::NotFound | Error::SymlinkLoop) => {}
                Err(error) => return Err(error).with_context(|| at.to_string()),
            }
        }
        let (dir, name) = lookup_parent(fs, at)?;
        Ok(Self::Name(dir, name))
    }

    pub(super) fn is_dir(&self) -> bool {
        matches!(self, Self::Dir(_))
    }

    /// The directory and the name that a file with this name gets.
    pub(super) fn of<'n>(&self, name: &'n [u8]) -> anyhow::Result<(InodeId, &'n [u8])>
    where
        't: 'n,
    {
        match *self {
            Self::Dir(_) if matches!(name, b"." | b"..") => {
                bail!("'{}' is not a name for a file in a directory", printable(name))
            }
            Self::Dir(dir) => Ok((dir, name)),
            Self::Name(dir, name) => Ok((dir, name)),
        }
    }

    /// The path of the directory, whose operand is `at`.
    pub(super) fn dir_path(&self, at: &ImagePath) -> Vec<u8> {
        match self {
            Self::Dir(_) => at.path.clone(),
            Self::Name(..) => at.split_name().map_or_else(|| at.path.clone(), |(dir, _)| dir),
        }
    }

    /// The text of a name at this place, whose operand is `at`.
    pub(super) fn shown(&self, at: &ImagePath, name: &[u8]) -> ImagePath {
        let path = match self {
            Self::Dir(_) => child_path(&at.path, name),
            Self::Name(..) => at.path.clone(),
        };
        ImagePath { image: at.image.clone(), path }
    }
}
