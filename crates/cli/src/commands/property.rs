//! `ubtrfs property list`, `get`, `set`: properties of files, subvolumes and filesystems, named as in btrfs-progs.

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use rustix::io::Errno;
use ubtrfs_control::{Channel, CommandFailure, OpenedFile, Request, Response, file, filesystem, subvolume};
use ubtrfs_format::item::RootFlags;

use super::offline::text::printable;
use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, open, with_channel};
use crate::common::print_out;
use crate::progs::{failed_call, is_progs};

/// Show and set properties of files, subvolumes and filesystems
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List the properties that a path has
    List(ListArgs),
    /// Show properties
    Get(PropertyGetArgs),
    /// Set a property
    Set(PropertySetArgs),
}

#[derive(clap::Args)]
struct ListArgs {
    #[command(flatten)]
    of: OfType,
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE[:/PATH]")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(clap::Args)]
struct PropertyGetArgs {
    #[command(flatten)]
    of: OfType,
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE[:/PATH]")]
    path: CommandTarget,
    /// The property; by default, all properties that are set
    name: Option<PropertyName>,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(clap::Args)]
struct PropertySetArgs {
    #[command(flatten)]
    of: OfType,
    /// Make a received subvolume writable, which removes its received UUID
    #[arg(short, long)]
    force: bool,
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE[:/PATH]")]
    path: CommandTarget,
    /// The property
    name: PropertyName,
    /// ro: true or false; label: a text; compression: zlib, lzo, zstd, none, or an empty text to remove it
    value: std::ffi::OsString,
    #[command(flatten)]
    image: ImageOptions,
}

// This struct has no doc comment, because it would become the help of the commands.
#[derive(clap::Args)]
struct OfType {
    /// Take the path as an object of this type: inode, subvol, filesystem or device; letters may be left out at the end
    #[arg(short = 't', long = "type", value_name = "TYPE", value_parser = parse_type)]
    of_type: Option<Type>,
}

/// The kinds of objects that have properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Inode,
    Subvolume,
    Filesystem,
    Device,
}

fn parse_type(text: &str) -> Result<Type, String> {
    let types = [
        ("inode", Type::Inode),
        ("subvol", Type::Subvolume),
        ("filesystem", Type::Filesystem),
        ("device", Type::Device),
    ];
    let found = types.iter().find(|(name, _)| !text.is_empty() && name.starts_with(text));
    let unknown = || format!("'{text}' is not a type; give one of: inode, subvol, filesystem, device");
    found.map(|(_, of)| *of).ok_or_else(unknown)
}

impl Type {
    /// Whether objects of this type have this property.
    fn has(self, name: PropertyName) -> bool {
        matches!(
            (self, name),
            (Self::Inode, PropertyName::Compression)
                | (Self::Subvolume, PropertyName::Ro)
                | (Self::Filesystem | Self::Device, PropertyName::Label)
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PropertyName {
    /// Whether a subvolume is read-only
    Ro,
    /// The label of the filesystem
    Label,
    /// How the content of a file, or of new files of a directory, is compressed
    Compression,
}

impl PropertyName {
    fn text(self) -> &'static str {
        match self {
            Self::Ro => "ro",
            Self::Label => "label",
            Self::Compression => "compression",
        }
    }

    fn help(self) -> &'static str {
        match self {
            Self::Ro => "read-only status of a subvolume",
            Self::Label => "label of the filesystem",
            Self::Compression => "compression algorithm for the file or directory",
        }
    }
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::List(args) => list(args),
        Command::Get(args) => get(args),
        Command::Set(args) => set(args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// The properties that a file has: `ro` only for the root directory of a subvolume, `label` only for the top
/// level.
fn names(channel: &Channel<'_>, file: &OpenedFile, of: &OfType) -> anyhow::Result<Vec<PropertyName>> {
    let (info, is_root) = channel.subvolume_of(file)?;
    let mut names = Vec::new();
    if is_root {
        names.push(PropertyName::Ro);
    }
    if is_root && info.parent.is_none() {
        names.push(PropertyName::Label);
    }
    names.push(PropertyName::Compression);
    names.retain(|name| of.of_type.is_none_or(|of| of.has(*name)));
    Ok(names)
}

fn list(args: &ListArgs) -> anyhow::Result<()> {
    let target = &args.path.clone().or_image_elsewhere();
    let names =
        with_channel(target, &args.image, ImageUse::Read, |channel| names(channel, &open(channel, target)?, &args.of))?;
    print_out(&names.iter().map(|name| format!("{:<20}{}\n", name.text(), name.help())).collect::<String>())
}

/// Fails if objects of the chosen type do not have this property.
fn check_type(of: &OfType, name: PropertyName) -> anyhow::Result<()> {
    if of.of_type.is_some_and(|of| !of.has(name)) {
        bail!("objects of this type have no property {}; leave out -t", name.text());
    }
    Ok(())
}

fn get(args: &PropertyGetArgs) -> anyhow::Result<()> {
    args.name.map_or(Ok(()), |name| check_type(&args.of, name))?;
    let target = &args.path.clone().or_image_elsewhere();
    let text = with_channel(target, &args.image, ImageUse::Read, |channel| {
        let file = open(channel, target)?;
        let names = match args.name {
            None => names(channel, &file, &args.of)?,
            // As in btrfs-progs, a file or directory in a subvolume has no label.
            Some(PropertyName::Label) if !channel.subvolume_of(&file)?.1 => bail!(match is_progs() {
                true => "object is not compatible with property: label".to_owned(),
                false => format!("{target} has no label, the filesystem has; see: ubtrfs filesystem label"),
            }),
            Some(name) => vec![name],
        };
        let mut text = String::new();
        for name in names {
            let value =
                value(channel, &file, name).with_context(|| format!("cannot read {} of {target}", name.text()))?;
            if let Some(value) = value {
                text += &format!("{}={value}\n", name.text());
            }
        }
        Ok(text)
    })?;
    print_out(&text)
}

fn value(channel: &Channel<'_>, opened: &OpenedFile, name: PropertyName) -> anyhow::Result<Option<String>> {
    Ok(match name {
        PropertyName::Ro => match channel.subvolume_of(opened)? {
            (info, true) => Some(info.flags.contains(RootFlags::RDONLY).to_string()),
            (_, false) => bail!("it is not a subvolume; list them with: ubtrfs subvolume list"),
        },
        PropertyName::Label => match channel.call(Request::Filesystem(filesystem::Request::Info), &[opened])? {
            Response::Filesystem(filesystem::Response::Info(info)) => Some(printable(&info.label)),
            _ => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
        },
        PropertyName::Compression => {
            match channel.call(Request::File(file::Request::Compression { of: 0 }), &[opened])? {
                Response::File(file::Response::Compression(method)) => method,
                _ => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
            }
        }
    })
}

fn set(args: &PropertySetArgs) -> anyhow::Result<()> {
    check_type(&args.of, args.name)?;
    let (target, bytes) = (&args.path.clone().or_image_elsewhere(), args.value.as_encoded_bytes());
    let read_only = match (args.name, bytes) {
        (PropertyName::Ro, b"true") => true,
        (PropertyName::Ro, b"false") => false,
        (PropertyName::Ro, _) if is_progs() => bail!("invalid value for property: {}", printable(bytes)),
        (PropertyName::Ro, _) => bail!("ro must be true or false, not '{}'", printable(bytes)),
        _ => false,
    };
    with_channel(target, &args.image, ImageUse::Write, |channel| {
        let opened = open(channel, target)?;
        if read_only {
            // Write dirty pages first, because the server refuses writes once the subvolume is read-only.
            channel.flush(&opened).with_context(|| format!("cannot write back {target}"))?;
        }
        let request = match args.name {
            PropertyName::Ro => {
                Request::Subvolume(subvolume::Request::SetReadOnly { of: 0, read_only, force: args.force })
            }
            PropertyName::Label if !channel.subvolume_of(&opened)?.1 => {
                bail!("{target} is not a subvolume, so it has no label; name the mount or the image")
            }
            PropertyName::Label => Request::Filesystem(filesystem::Request::SetLabel { label: bytes.to_vec() }),
            PropertyName::Compression => Request::File(file::Request::SetCompression { of: 0, method: bytes.to_vec() }),
        };
        let name = args.name.text();
        let failed = |failure: CommandFailure| {
            let known = failed_call(&failure, &[Errno::INVAL], || format!("failed to set {name} for {target}"));
            known.unwrap_or_else(|| anyhow::Error::from(failure).context(format!("cannot set {name} of {target}")))
        };
        channel.call(request, &[&opened]).map(|_| ()).map_err(failed)
    })
}
