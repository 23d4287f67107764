//! `ubtrfs property list`, `get`, `set`: properties of files, subvolumes and filesystems, named as in btrfs-progs.

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use ubtrfs_control::{Channel, OpenedFile, Request, Response, file, filesystem, subvolume};
use ubtrfs_format::item::RootFlags;

use super::offline::text::printable;
use super::offline::{ImageOptions, Use};
use super::place::{Target, open, with_channel};
use crate::common::print_out;

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
    Get(GetArgs),
    /// Set a property
    Set(SetArgs),
}

#[derive(clap::Args)]
struct ListArgs {
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(clap::Args)]
struct GetArgs {
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    /// The property; by default, all properties that are set
    name: Option<Name>,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(clap::Args)]
struct SetArgs {
    /// Make a received subvolume writable, which removes its received UUID
    #[arg(short, long)]
    force: bool,
    /// The file or directory
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    /// The property
    name: Name,
    /// ro: true or false; label: a text; compression: zlib, lzo, zstd, none, or an empty text to remove it
    value: std::ffi::OsString,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Whether a subvolume is read-only
    Ro,
    /// The label of the filesystem
    Label,
    /// How the content of a file, or of new files of a directory, is compressed
    Compression,
}

impl Name {
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
fn names(channel: &Channel<'_>, file: &OpenedFile) -> anyhow::Result<Vec<Name>> {
    let (info, is_root) = channel.subvolume_of(file)?;
    let mut names = Vec::new();
    if is_root {
        names.push(Name::Ro);
    }
    if is_root && info.parent.is_none() {
        names.push(Name::Label);
    }
    names.push(Name::Compression);
    Ok(names)
}

fn list(args: &ListArgs) -> anyhow::Result<()> {
    let names =
        with_channel(&args.path, &args.image, Use::Read, |channel| names(channel, &open(channel, &args.path)?))?;
    print_out(&names.iter().map(|name| format!("{:<20}{}\n", name.text(), name.help())).collect::<String>())
}

fn get(args: &GetArgs) -> anyhow::Result<()> {
    let target = &args.path;
    let text = with_channel(target, &args.image, Use::Read, |channel| {
        let file = open(channel, target)?;
        let names = args.name.map_or_else(|| names(channel, &file), |name| Ok(vec![name]))?;
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

fn value(channel: &Channel<'_>, opened: &OpenedFile, name: Name) -> anyhow::Result<Option<String>> {
    Ok(match name {
        Name::Ro => match channel.subvolume_of(opened)? {
            (info, true) => Some(info.flags.contains(RootFlags::RDONLY).to_string()),
            (_, false) => bail!("it is not a subvolume; list them with: ubtrfs subvolume list"),
        },
        Name::Label => match channel.call(Request::Filesystem(filesystem::Request::Info), &[opened])? {
            Response::Filesystem(filesystem::Response::Info(info)) => Some(printable(&info.label)),
            _ => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
        },
        Name::Compression => match channel.call(Request::File(file::Request::Compression { of: 0 }), &[opened])? {
            Response::File(file::Response::Compression(method)) => method,
            _ => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
        },
    })
}

fn set(args: &SetArgs) -> anyhow::Result<()> {
    let (target, bytes) = (&args.path, args.value.as_encoded_bytes());
    let read_only = match (args.name, bytes) {
        (Name::Ro, b"true") => true,
        (Name::Ro, b"false") => false,
        (Name::Ro, _) => bail!("ro must be true or false, not '{}'", printable(bytes)),
        _ => false,
    };
    with_channel(target, &args.image, Use::Write, |channel| {
        let opened = open(channel, target)?;
        if read_only {
            // Write dirty pages first, because the server refuses writes once the subvolume is read-only.
            channel.flush(&opened).with_context(|| format!("cannot write back {target}"))?;
        }
        let request = match args.name {
            Name::Ro => Request::Subvolume(subvolume::Request::SetReadOnly { of: 0, read_only, force: args.force }),
            Name::Label if !channel.subvolume_of(&opened)?.1 => {
                bail!("{target} is not a subvolume, so it has no label; name the mount or the image")
            }
            Name::Label => Request::Filesystem(filesystem::Request::SetLabel { label: bytes.to_vec() }),
            Name::Compression => Request::File(file::Request::SetCompression { of: 0, method: bytes.to_vec() }),
        };
        let done = channel.call(request, &[&opened]);
        done.map(|_| ()).with_context(|| format!("cannot set {} of {target}", args.name.text()))
    })
}
