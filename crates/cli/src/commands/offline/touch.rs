//! `ubtrfs touch` and `ubtrfs truncate`: times and sizes of files, and empty files.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Attr, Caller, Error, Fs, NewInode, SetAttr, SetTime, mode};

use super::attributes::current_umask;
use super::operands::{Patterns, for_each_file};
use super::text::{parse_time, type_text};
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, lookup, lookup_parent, type_of, with_image};
use crate::commands::place::await_server;
use crate::common::{Shown, calling_user, parse_size};

/// Set the times of files in an image, and make missing files
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "TIME is a date with a time in UTC (2026-11-21 15:38:32.5), with a zone at its end (+01:00), a date alone, \
                        @SECONDS since 1970, or now."
)]
pub(crate) struct TouchArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Set only the time of the last access
    #[arg(short)]
    access: bool,
    /// Set only the time of the last modification
    #[arg(short)]
    modification: bool,
    /// Make no files
    #[arg(short = 'c', long)]
    no_create: bool,
    /// Set this time instead of the current time
    #[arg(short, long, value_name = "TIME", allow_hyphen_values = true, value_parser = parse_time)]
    date: Option<Timespec>,
    /// Set the times of this file, which is IMAGE:/PATH or a file of this system
    #[arg(short, long, value_name = "FILE", conflicts_with = "date")]
    reference: Option<OsString>,
    /// Change symbolic links instead of their targets
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Owner of new files: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// Set the size of files in an image
#[derive(clap::Args)]
#[command(
    after_help = "SIZE is a number with an optional K, M, G, T (powers of 1024). + or - before it adds or removes bytes, < makes \
                        files at most, > at least as large; / and % round down and up to a multiple. A file grows by a \
                        hole. Missing files are made."
)]
pub(crate) struct TruncateArgs {
    /// The new size
    #[arg(short, long, value_name = "SIZE", required = true, allow_hyphen_values = true, value_parser = SizeChange::parse)]
    size: SizeChange,
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Make no files
    #[arg(short = 'c', long)]
    no_create: bool,
    /// Owner of new files: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

/// How a size is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeChange {
    To(u64),
    Add(u64),
    Remove(u64),
    AtMost(u64),
    AtLeast(u64),
    RoundDown(u64),
    RoundUp(u64),
}

impl SizeChange {
    fn parse(text: &str) -> Result<Self, String> {
        let change: fn(u64) -> Self = match text.as_bytes().first() {
            Some(b'+') => Self::Add,
            Some(b'-') => Self::Remove,
            Some(b'<') => Self::AtMost,
            Some(b'>') => Self::AtLeast,
            Some(b'/') => Self::RoundDown,
            Some(b'%') => Self::RoundUp,
            _ => return parse_size(text).map(Self::To),
        };
        match change(parse_size(&text[1..])?) {
            Self::RoundDown(0) | Self::RoundUp(0) => Err("sizes cannot be rounded to a multiple of 0".to_owned()),
            change => Ok(change),
        }
    }

    /// The new size; `None` if it is larger than any number.
    fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::To(size) => Some(size),
            Self::Add(more) => old.checked_add(more),
            Self::Remove(less) => Some(old.saturating_sub(less)),
            Self::AtMost(limit) => Some(old.min(limit)),
            Self::AtLeast(limit) => Some(old.max(limit)),
            Self::RoundDown(unit) => Some(old - old % unit),
            Self::RoundUp(unit) => old.checked_next_multiple_of(unit),
        }
    }
}

pub(crate) fn run_touch(args: TouchArgs) -> anyhow::Result<ExitCode> {
    let times = match (&args.reference, args.date) {
        (Some(reference), _) => {
            let times = times_of(reference, &args);
            times.with_context(|| format!("cannot read the times of {}", reference.shown()))?.map(SetTime::At)
        }
        (None, Some(date)) => [SetTime::At(date); 2],
        (None, None) => [SetTime::Now; 2],
    };
    // Without -a and -m, both times are set.
    let set = SetAttr {
        atime: (args.access || !args.modification).then_some(times[0]),
        mtime: (args.modification || !args.access).then_some(times[1]),
        ..SetAttr::default()
    };
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::Match, |fs, path| {
        let found = fs.lookup_path(&path.path, !args.no_dereference);
        let attr = match found {
            Err(Error::NotFound) if args.no_create => return Ok(()),
            Err(Error::NotFound) if !args.no_dereference => make_file(fs, path, args.owner)?,
            found => found.with_context(|| path.to_string())?,
        };
        let done = fs.setattr(attr.id, &set, &Caller::ROOT);
        done.map(|_| ()).with_context(|| format!("cannot set the times of {path}"))
    }))
}

/// The times of the last access and modification of a file in an image or of this system.
fn times_of(reference: &OsString, args: &TouchArgs) -> anyhow::Result<[Timespec; 2]> {
    use std::os::unix::fs::MetadataExt;
    if let Some(at) = ImagePath::split(reference) {
        return with_image(&at.image, &args.image, ImageUse::Read, |fs| {
            let attr = lookup(fs, &at, !args.no_dereference)?;
            Ok([attr.atime, attr.mtime])
        });
    }
    let path = PathBuf::from(reference);
    await_server(&path)?;
    let meta = if args.no_dereference { path.symlink_metadata()? } else { path.metadata()? };
    let time = |sec, nsec: i64| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or(0) };
    Ok([time(meta.atime(), meta.atime_nsec()), time(meta.mtime(), meta.mtime_nsec())])
}

/// Makes an empty file at a path that leads nowhere.
fn make_file(fs: &Fs, path: &ImagePath, owner: Option<(u32, u32)>) -> anyhow::Result<Attr> {
    let cannot = || format!("cannot make {path}");
    if path.path.ends_with(b"/") {
        return Err(Error::NotFound).with_context(|| path.to_string());
    }
    let (parent, name) = lookup_parent(fs, path)?;
    if fs.lookup(parent, name).is_ok() {
        bail!("{path} is a symbolic link that leads nowhere; remove it first");
    }
    let (uid, gid) = owner.unwrap_or_else(calling_user);
    let caller = Caller { uid, gid, umask: current_umask() };
    fs.create(parent, name, NewInode::file(0o666), &caller).with_context(cannot)
}

pub(crate) fn run_truncate(args: TruncateArgs) -> anyhow::Result<ExitCode> {
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::Match, |fs, path| {
        let attr = match fs.lookup_path(&path.path, true) {
            Err(Error::NotFound) if args.no_create => return Ok(()),
            Err(Error::NotFound) => make_file(fs, path, args.owner)?,
            found => found.with_context(|| path.to_string())?,
        };
        let cannot = || format!("cannot set the size of {path}");
        if type_of(attr.mode) != mode::REGULAR {
            bail!("{path} is a {}; name a file", type_text(attr.mode));
        }
        let size = args.size.apply(attr.size).ok_or(Error::FileTooBig).with_context(cannot)?;
        let set = SetAttr { size: Some(size), mtime: Some(SetTime::Now), ..SetAttr::default() };
        fs.setattr(attr.id, &set, &Caller::ROOT).with_context(cannot)?;
        // As on Linux, a file whose content changes loses its capabilities.
        fs.drop_capability(attr.id).map(|_| ()).with_context(cannot)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_change_as_by_truncate() {
        let changed = |text: &str, old| SizeChange::parse(text).unwrap().apply(old);
        assert_eq!(changed("10K", 5), Some(10_240));
        assert_eq!(changed("+5", 5), Some(10));
        assert_eq!(changed("-5", 3), Some(0));
        assert_eq!(changed("<5", 9), Some(5));
        assert_eq!(changed(">5", 3), Some(5));
        assert_eq!(changed("/4", 7), Some(4));
        assert_eq!(changed("%4", 5), Some(8));
        assert_eq!(changed("+7E", u64::MAX), None);
        for wrong in ["", "+", "x", "1x", "++1", "/0", "%0", "\u{e4}"] {
            assert!(SizeChange::parse(wrong).is_err(), "{wrong}");
        }
    }
}
