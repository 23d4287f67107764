//! `ubtrfs filesystem fiemap`, `clone` and `dedupe`, which replace ioctls that do not reach a FUSE server.

use std::fmt::Write as _;

use anyhow::{Context, bail};
use serde_json::json;
use ubtrfs_control::file::{MappedExtent, MappedExtentKind, Ranges, Request, Response};
use ubtrfs_control::{Channel, CreatedFile, OpenedFile, Request as Command};
use ubtrfs_fs::{Caller, NewInode};

use crate::commands::offline::{ImageOptions, ImageUse, lookup_parent};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::common::{calling_user, parse_size, print_json, print_out};
use crate::job::with_progress_in_bytes;

/// Show the extents of a file
#[derive(clap::Args)]
pub(super) struct FiemapArgs {
    /// The file
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    file: CommandTarget,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Make a range of one file share the extents of a range of another file
///
/// A target that does not exist is made, as by cp --reflink.
#[derive(clap::Args)]
pub(super) struct CloneArgs {
    #[command(flatten)]
    ranges: RangeArgs,
}

/// Make two ranges share their extents if their content is equal
#[derive(clap::Args)]
pub(super) struct DedupeArgs {
    #[command(flatten)]
    ranges: RangeArgs,
}

#[derive(clap::Args)]
struct RangeArgs {
    /// The file to share from
    #[arg(value_name = "SOURCE")]
    source: CommandTarget,
    /// The file to change, in the same mount or image
    #[arg(value_name = "TARGET")]
    target: CommandTarget,
    /// Offset of the range in the source
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    source_offset: u64,
    /// Offset of the range in the target
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    target_offset: u64,
    /// Length of the range; up to the end of the source, by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    length: u64,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn fiemap(args: &FiemapArgs) -> anyhow::Result<()> {
    let target = &args.file;
    let extents = with_channel(target, &args.image, ImageUse::Read, |channel| {
        let file = open(channel, target)?;
        // Data in the kernel's page cache has no extent yet.
        channel.flush_file(&file).with_context(|| format!("cannot write back {target}"))?;
        extents(channel, &file).with_context(|| format!("cannot list the extents of {target}"))
    })?;
    if args.json {
        return print_json(&json!(extents));
    }
    let mut text = format!("{:>18} {:>18} {:>18} flags\n", "offset", "length", "address");
    for extent in &extents {
        let mut flags = Vec::new();
        match extent.kind {
            MappedExtentKind::Data => {}
            MappedExtentKind::Inline => flags.push("inline"),
            MappedExtentKind::Prealloc => flags.push("unwritten"),
            MappedExtentKind::Delalloc => flags.push("delalloc"),
        }
        if extent.is_compressed {
            flags.push("encoded");
        }
        if extent.is_shared {
            flags.push("shared");
        }
        let flags = if flags.is_empty() { "-".to_owned() } else { flags.join(",") };
        writeln!(text, "{:>18} {:>18} {:>18} {flags}", extent.offset, extent.len, extent.address)?;
    }
    print_out(&text)
}

fn extents(channel: &Channel<'_>, file: &OpenedFile) -> anyhow::Result<Vec<MappedExtent>> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let request = Command::File(Request::Extents { of: 0, from });
        match channel.call(request, &[file])? {
            ubtrfs_control::Response::File(Response::Extents { extents, next }) => {
                all.extend(extents);
                match next {
                    Some(next) if next > from => from = next,
                    _ => return Ok(all),
                }
            }
            _ => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
        }
    }
}

pub(super) fn clone(args: &CloneArgs) -> anyhow::Result<()> {
    let what = "sharing extents";
    share(&args.ranges, true, what, Request::Clone).map(|_| ())
}

pub(super) fn dedupe(args: &DedupeArgs) -> anyhow::Result<()> {
    match share(&args.ranges, false, "comparing and sharing extents", Request::Dedupe)? {
        Response::Deduped { same: false } => {
            bail!("{} and {} differ in this range; nothing was changed", args.ranges.source, args.ranges.target)
        }
        _ => Ok(()),
    }
}

fn share(
    args: &RangeArgs,
    makes_target: bool,
    what: &'static str,
    request: fn(Ranges) -> Request,
) -> anyhow::Result<Response> {
    let (source, target) = (&args.source, &args.target);
    if !source.shares_filesystem_with(target) {
        bail!("{source} and {target} are not in the same filesystem; name two paths in one mount or one image");
    }
    let ranges = Ranges { source: args.source_offset, target: args.target_offset, len: args.length };
    with_channel(source, &args.image, ImageUse::Write, |channel| {
        if channel.is_dir(source.path())? == Some(true) {
            bail!("{source} is a directory; name a regular file");
        }
        let from = open(channel, source)?;
        let (to, made) = match channel.is_dir(target.path()) {
            Ok(None) if makes_target => {
                let (made, to) =
                    NewFile::make(channel, (source, &from), target).with_context(|| format!("cannot make {target}"))?;
                (Ok(to), Some(made))
            }
            _ if makes_target => (channel.open_writable(target.path()), None),
            // Without write access, the owner and root may deduplicate, also in a read-only subvolume.
            _ => (channel.open_writable(target.path()).or_else(|_| channel.open(target.path())), None),
        };
        let to = to.with_context(|| format!("cannot open {target}"))?;
        for (file, name) in [(&from, source), (&to, target)] {
            channel.flush_file(file).with_context(|| format!("cannot write back {name}"))?;
        }
        let ask = |ranges| {
            let command = Command::File(request(ranges));
            let done = with_progress_in_bytes(what, |job| channel.call_with(command, &[&from, &to], job));
            match done.with_context(|| format!("cannot share extents of {source} with {target}"))? {
                ubtrfs_control::Response::File(response) => Ok(response),
                _ => bail!("the server of {target} answered something else"),
            }
        };
        let done = match ask(ranges)? {
            Response::GrowFirst { size } => {
                // Source and target may be one file, whose end is another one after it has grown.
                let ranges = Ranges { len: size.saturating_sub(ranges.target), ..ranges };
                grown(&to, size, || ask(ranges)).with_context(|| format!("cannot make {target} longer"))?
            }
            done => done,
        };
        made.into_iter().for_each(NewFile::keep);
        Ok(done)
    })
}

/// A file that the command made; removed on drop unless it is kept.
struct NewFile<'f> {
    channel: &'f Channel<'f>,
    target: &'f CommandTarget,
    /// The file, in a mount; `None` in an image.
    in_mount: Option<CreatedFile>,
    is_kept: bool,
}

impl<'f> NewFile<'f> {
    /// Makes the empty file `target` with the permissions of `source`, without those that the umask removes, and opens it
    /// for writing, which these permissions need not allow.
    fn make(
        channel: &'f Channel<'f>,
        (source, from): (&CommandTarget, &OpenedFile),
        target: &'f CommandTarget,
    ) -> anyhow::Result<(Self, OpenedFile)> {
        let mut made = Self { channel, target, in_mount: None, is_kept: false };
        if let (Channel::Image { fs, .. }, CommandTarget::Image(at)) = (channel, target) {
            let mode = fs.lookup_path(source.path().as_os_str().as_encoded_bytes(), true)?.mode & 0o777;
            let (dir, name) = lookup_parent(fs, at)?;
            let (uid, gid) = calling_user();
            fs.create(dir, name, NewInode::file(mode), &Caller { uid, gid, umask: 0o022 })?;
            return Ok((made, channel.open_writable(target.path())?));
        }
        let OpenedFile::Descriptor(from) = from else { bail!("it is in an image") };
        let mode = rustix::fs::fstat(from)?.st_mode & 0o777;
        let Some(created) = channel.create_file(target.path(), mode) else { bail!("it is in an image") };
        let (created, opened) = created?;
        made.in_mount = Some(created);
        Ok((made, opened))
    }

    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for NewFile<'_> {
    /// Errors are ignored: the failure of the command is reported already.
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Some(created) = self.in_mount.take() {
            let _ = created.remove();
        } else if let (Channel::Image { fs, .. }, CommandTarget::Image(at)) = (self.channel, self.target) {
            let _ = lookup_parent(fs, at).map(|(dir, name)| fs.unlink(dir, name));
        }
    }
}

/// Extends a file of a mount to `size`, does the work, and restores the file's old size if the work fails and the file
/// still has `size` bytes.
fn grown(file: &OpenedFile, size: u64, work: impl FnOnce() -> anyhow::Result<Response>) -> anyhow::Result<Response> {
    let OpenedFile::Descriptor(file) = file else { bail!("it is in an image") };
    let size_now = || rustix::fs::fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or_default());
    let before = size_now()?;
    if before < size {
        rustix::fs::ftruncate(file, size)?;
    }
    let done = work();
    if done.is_err() && before < size && size_now()? == size {
        rustix::fs::ftruncate(file, before)?;
    }
    done
}
