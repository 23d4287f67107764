//! `ubtrfs subvolume snapshot`.

use std::path::Path;

use anyhow::{Context, bail};
use ubtrfs_fs::{Error, Fs};

use super::problem::explain;
use super::{Target, lookup_subvolume, open_mounted, open_subvolume, split_name};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImagePath, Use, child_path, lookup_parent, with_image};
use crate::common::print_out;

/// Make a snapshot of a subvolume
#[derive(clap::Args)]
pub(super) struct Args {
    /// The subvolume
    #[arg(value_name = "SOURCE")]
    source: Target,
    /// A new name, or a directory for a snapshot with the subvolume's name; in the same mount or image
    #[arg(value_name = "DEST")]
    dest: Target,
    /// Make the snapshot read-only
    #[arg(short)]
    read_only: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (source, dest) = (&args.source, &args.dest);
    let made = match (source, dest) {
        _ if !source.is_beside(dest) => return Err(elsewhere(args)),
        (Target::Image(source), Target::Image(dest)) => {
            with_image(&source.image, &args.image, Use::Write, |fs| in_image(fs, source, dest, args.read_only))?
        }
        (Target::Mounted(source), Target::Mounted(dest)) => mounted(source, dest, args)?,
        _ => return Err(elsewhere(args)),
    };
    let kind = if args.read_only { "readonly snapshot" } else { "snapshot" };
    print_out(&format!("Create a {kind} of '{source}' in '{made}'\n"))
}

fn elsewhere(args: &Args) -> anyhow::Error {
    anyhow::anyhow!(
        "{} and {} are not in the same filesystem; name two paths in one mount or one image",
        args.source,
        args.dest
    )
}

/// Makes a snapshot in an image; returns its path.
fn in_image(fs: &Fs, source: &ImagePath, dest: &ImagePath, read_only: bool) -> anyhow::Result<String> {
    let id = lookup_subvolume(fs, source)?;
    let (dir, name, path) = match fs.lookup_path(&dest.path, true) {
        Ok(attr) if attr.is_dir() => {
            let names = source.names();
            let Some(name) = names.last() else {
                bail!("{source} has no name to give to its snapshot in {dest}; name the snapshot");
            };
            (attr.id, *name, child_path(&dest.path, name))
        }
        Ok(_) => return Err(explain("make", dest, Error::Exists)),
        Err(Error::NotFound) => {
            let (dir, name) = lookup_parent(fs, dest)?;
            (dir, name, dest.path.clone())
        }
        Err(error) => return Err(error).with_context(|| format!("{dest}")),
    };
    let made = format!("{}:{}", dest.image.display(), printable(&path));
    fs.snapshot(id, dir, name, read_only).map_err(|error| explain("make", &made, error))?;
    Ok(made)
}

fn mounted(source: &Path, dest: &Path, args: &Args) -> anyhow::Result<String> {
    let subvolume = open_subvolume(source)?;
    let full;
    let (dir, name, made) = if dest.is_dir() {
        full = std::fs::canonicalize(source).with_context(|| format!("cannot open {}", source.display()))?;
        let (_, name) = split_name(&full)?;
        (dest, name, dest.join(full.file_name().unwrap_or_default()))
    } else {
        let (dir, name) = split_name(dest)?;
        (dir, name, dest.to_owned())
    };
    let dir = open_mounted(dir)?;
    if !dir.is_same_mount(&subvolume)? {
        return Err(elsewhere(args));
    }
    dir.snapshot(&subvolume, args.read_only, name).map_err(|error| explain("make", made.display(), error))?;
    Ok(made.display().to_string())
}
