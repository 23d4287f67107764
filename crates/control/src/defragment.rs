//! Defragmenting files.
//!
//! | command     | needs                                                                                    |
//! |-------------|------------------------------------------------------------------------------------------|
//! | a file      | the file open for writing, or the rights of an administrator ([`CommandContext::require_admin`]) |
//! | a directory with everything below it | the rights of an administrator                                   |
//!
//! A walk does not enter other subvolumes. Files that cannot be defragmented are skipped and counted.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::item::Compression;
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{CompressSpec, Defragment, Error, InodeId};

use crate::dir_part::{check_depth, part_of};
use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};

/// Defragments a file, or all files below a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Request {
    /// The file or directory.
    pub file: FileNr,
    /// Offset of the first byte to defragment.
    pub start: u64,
    /// The number of bytes to defragment.
    pub len_bytes: u64,
    /// Extents of at least this many bytes are not rewritten, unless they are uncompressed and `compress` is given.
    pub small_bytes: u64,
    /// The method and level to compress with, if any.
    pub compress: Option<(DefragmentCompression, i32)>,
    /// Whether to rewrite also extents that snapshots or other files share.
    pub unshare: bool,
    /// Whether each file's data is written to disk before the next file is defragmented.
    #[serde(default)]
    pub flush: bool,
    /// Whether the files are listed in [`Response::listed`].
    #[serde(default)]
    pub lists: bool,
}

/// A compression method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DefragmentCompression {
    /// zlib
    Zlib,
    /// lzo
    Lzo,
    /// zstd
    Zstd,
}

/// The result of a defragmentation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct Response {
    /// Files examined.
    pub files: u64,
    /// Bytes rewritten.
    pub bytes: u64,
    /// Files that could not be defragmented.
    pub failed: u64,
    /// The path of the first file that failed, below the given directory, and the reason; `None` if no file failed.
    pub first_failure: Option<String>,
    /// If the request asks for a list: the first of the examined files.
    #[serde(default)]
    pub listed: Vec<DefragmentedFile>,
    /// Bytes of the list so far.
    #[serde(skip)]
    listed_bytes: usize,
}

/// A file that was examined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefragmentedFile {
    /// The path below the directory of the request; empty for the file of the request itself.
    #[serde(with = "crate::bytes")]
    pub path: Vec<u8>,
}

impl Request {
    fn how(&self) -> Result<Defragment> {
        let mut compress = None;
        if let Some((method, level)) = self.compress {
            // Level 0 means the default level of the method.
            let (kind, levels) = match method {
                DefragmentCompression::Zlib => (Compression::Zlib, 0..=9),
                DefragmentCompression::Lzo => (Compression::Lzo, 0..=0),
                DefragmentCompression::Zstd => (Compression::Zstd, -15..=15),
            };
            if !levels.contains(&level) {
                let text = match method {
                    DefragmentCompression::Lzo => "lzo has no levels".to_owned(),
                    _ => format!("the level of the compression must be {} to {}", levels.start(), levels.end()),
                };
                return Err(CommandFailure::new(Errno::INVAL, text));
            }
            compress = Some(CompressSpec { kind, level, force: true });
        }
        let range = self.start..self.start.saturating_add(self.len_bytes);
        Ok(Defragment { range, small_bytes: self.small_bytes, compress, unshare: self.unshare })
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: &Request) -> Result<Response> {
    let file = context.file(request.file)?;
    let is_dir = context.fs.getattr(file.id)?.is_dir();
    if is_dir || !file.is_writable {
        context.require_admin()?;
    }
    let how = request.how()?;
    let mut done = Response::default();
    if !is_dir {
        done.bytes = rewrite(context, file.id, &how, request.flush)?;
        done.files = 1;
        done.listed.extend(request.lists.then(|| DefragmentedFile { path: Vec::new() }));
        return Ok(done);
    }
    // The open directories, each with the cookie to continue from (`None` after the last entry), and the length of its
    // path below the given directory.
    let mut open = vec![(file.id, Some(0), 0)];
    let mut path = Vec::new();
    while let Some((dir, cookie, len)) = open.last_mut() {
        let Some(from) = *cookie else {
            open.pop();
            continue;
        };
        context.job.check().map_err(Error::from)?;
        let len = *len;
        path.truncate(len);
        let part = part_of(context.fs, *dir, from)?;
        *cookie = part.next;
        for (id, name) in part.files {
            context.job.check().map_err(Error::from)?;
            push_name(&mut path, &name);
            one(context, id, &path, &how, request, &mut done)?;
            path.truncate(len);
        }
        // A walk does not enter other subvolumes.
        if let Some((id, name)) = part.dir.filter(|(id, _)| id.root == file.id.root) {
            check_depth(open.len())?;
            push_name(&mut path, &name);
            open.push((id, Some(0), path.len()));
        }
    }
    Ok(done)
}

fn push_name(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// Defragments one file of a walk. A failure is recorded in `done` with the file's `path`.
fn one(
    context: &CommandContext<'_>,
    id: InodeId,
    path: &[u8],
    how: &Defragment,
    request: &Request,
    done: &mut Response,
) -> Result<()> {
    done.files += 1;
    match rewrite(context, id, how, request.flush) {
        Ok(bytes) => done.bytes += bytes,
        // The file was removed during the walk.
        Err(error) if is_gone(&error) => {
            done.files -= 1;
            return Ok(());
        }
        Err(error) => {
            context.job.check().map_err(Error::from)?;
            done.failed += 1;
            done.first_failure.get_or_insert_with(|| format!("{}: {}", escaped(path), CommandFailure::from(error)));
        }
    }
    let listed_bytes = done.listed_bytes.saturating_add(path.len()).saturating_add(LISTED_OVERHEAD);
    if request.lists && listed_bytes <= LISTED_BYTES {
        done.listed.push(DefragmentedFile { path: path.to_vec() });
        done.listed_bytes = listed_bytes;
    } else {
        // The list ends here, even if shorter paths follow.
        done.listed_bytes = LISTED_BYTES;
    }
    Ok(())
}

/// Defragments one file. Returns the number of bytes rewritten.
fn rewrite(context: &CommandContext<'_>, id: InodeId, how: &Defragment, flush: bool) -> ubtrfs_fs::Result<u64> {
    let bytes = context.fs.defragment(id, how, context.job)?;
    if flush {
        context.fs.fsync(id, true)?;
    }
    Ok(bytes)
}

/// Whether an error means that the inode was removed after its name was read.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::NotFound | Error::Stale)
}

/// Bytes after which a list ends. The answer takes a few times this memory while it is sent.
const LISTED_BYTES: usize = 4 << 20;
/// Estimated bytes of a listed file without its path.
const LISTED_OVERHEAD: usize = 32;
