//! `ubtrfs ls`, `ubtrfs cat`, `ubtrfs stat`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};
use ubtrfs_format::item::Timespec;
use ubtrfs_format::print::{insert_name, insert_names, json_line};
use ubtrfs_fs::{Attr, Fs, mode, rdev_parts};

use super::operands::{Patterns, for_each_file};
use super::pattern::is_pattern;
use super::text::{mode_text, printable, short_time_text, time_text, type_text};
use super::{
    DirName, ImageOptions, ImagePath, ImagePathParser, ImageUse, PATTERNS_HELP, VisitedDirs, child_path, data_ranges,
    lookup, read_names, read_pieces, type_of,
};
use crate::common::{print_bytes, print_out};
use crate::units::short_size;

/// List directories of an image
#[derive(clap::Args)]
#[command(after_help = PATTERNS_HELP, disable_help_flag = true)]
pub(crate) struct LsArgs {
    /// Directories or files in images; an image alone means its root directory
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true }, required = true)]
    paths: Vec<ImagePath>,
    /// Show mode, links, owner, size and time (UTC)
    #[arg(short, long)]
    long: bool,
    /// With -l, show sizes in the largest unit that fits, such as 1.5M
    #[arg(short = 'h', long)]
    human_readable: bool,
    /// Also list all directories below the given ones
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Show directories themselves, not their content
    #[arg(short, long)]
    directory: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// Write files of an image to standard output
#[derive(clap::Args)]
#[command(after_help = PATTERNS_HELP)]
pub(crate) struct CatArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show all attributes of files in an image
#[derive(clap::Args)]
#[command(after_help = PATTERNS_HELP)]
pub(crate) struct StatArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Show the target of a symbolic link instead of the link
    #[arg(short = 'L', long)]
    dereference: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run_ls(args: LsArgs) -> anyhow::Result<ExitCode> {
    let mut headings = args.paths.len() > 1 || args.recursive || args.paths.iter().any(|path| is_pattern(&path.path));
    headings &= !args.json && !args.directory;
    let mut first = true;
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Read, Patterns::Match, |fs, path| {
        let start = lookup(fs, path, path.path.ends_with(b"/"))?;
        if !start.is_dir() || args.directory {
            return print_list(fs, &args, path, &[(path.path.clone(), start)]);
        }
        let mut passed = VisitedDirs::default();
        let mut todo = vec![(path.path.clone(), start)];
        while let Some((at, dir)) = todo.pop() {
            let here = ImagePath { image: path.image.clone(), path: at };
            passed.pass(dir.id).with_context(|| format!("{here}"))?;
            let mut entries = Vec::new();
            for DirName { name, id } in read_names(fs, dir.id).with_context(|| format!("{here}"))? {
                let attr = fs.getattr(id).with_context(|| format!("{here}: {}", printable(&name)))?;
                entries.push((name, attr));
            }
            if headings {
                let gap = if std::mem::take(&mut first) { "" } else { "\n" };
                print_out(&format!("{gap}{here}:\n"))?;
            }
            print_list(fs, &args, &here, &entries)?;
            if args.recursive {
                let dirs = entries.into_iter().rev().filter(|(_, attr)| attr.is_dir());
                todo.extend(dirs.map(|(name, attr)| (child_path(&here.path, &name), attr)));
            }
        }
        Ok(())
    }))
}

fn print_list(fs: &Fs, args: &LsArgs, dir: &ImagePath, entries: &[(Vec<u8>, Attr)]) -> anyhow::Result<()> {
    let mut text = String::new();
    if args.json {
        for (name, attr) in entries {
            let path = if attr.is_dir() && args.directory { name.clone() } else { child_path(&dir.path, name) };
            let path = if name.starts_with(b"/") { name.clone() } else { path };
            writeln!(text, "{}", json_line(&json_of(fs, &path, attr)?))?;
        }
        return print_out(&text);
    }
    if !args.long {
        for (name, _) in entries {
            writeln!(text, "{}", printable(name))?;
        }
        return print_out(&text);
    }
    let size = |attr: &Attr| match type_of(attr.mode) {
        mode::CHAR | mode::BLOCK => {
            let (major, minor) = rdev_parts(attr.rdev);
            format!("{major}, {minor}")
        }
        _ if args.human_readable => short_size(attr.size),
        _ => attr.size.to_string(),
    };
    let columns: Vec<[String; 4]> = entries
        .iter()
        .map(|(_, attr)| [attr.nlink.to_string(), attr.uid.to_string(), attr.gid.to_string(), size(attr)])
        .collect();
    let width = |column: usize| columns.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    for ((name, attr), row) in entries.iter().zip(&columns) {
        write!(text, "{}", mode_text(attr.mode))?;
        for (field, width) in row.iter().zip(widths) {
            write!(text, " {field:>width$}")?;
        }
        write!(text, " {} {}", short_time_text(attr.mtime), printable(name))?;
        if type_of(attr.mode) == mode::SYMLINK {
            write!(text, " -> {}", printable(&fs.readlink(attr.id)?))?;
        }
        text.push('\n');
    }
    print_out(&text)
}

pub(crate) fn run_cat(args: CatArgs) -> anyhow::Result<ExitCode> {
    let mut buf = Vec::new();
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Read, Patterns::Match, |fs, path| {
        let attr = lookup(fs, path, true)?;
        if type_of(attr.mode) != mode::REGULAR {
            anyhow::bail!("{path} is a {}; name a file", type_text(attr.mode));
        }
        read_pieces(fs, attr.id, (0, attr.size), &mut buf, |_, bytes| print_bytes(bytes))
            .with_context(|| format!("{path}"))
    }))
}

pub(crate) fn run_stat(args: StatArgs) -> anyhow::Result<ExitCode> {
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Read, Patterns::Match, |fs, path| {
        let attr = lookup(fs, path, args.dereference)?;
        if args.json {
            return print_out(&format!("{}\n", json_line(&json_of(fs, &path.path, &attr)?)));
        }
        print_out(&stat_text(fs, path, &attr)?)
    }))
}

fn stat_text(fs: &Fs, path: &ImagePath, attr: &Attr) -> anyhow::Result<String> {
    let mut text = String::new();
    write!(text, "{:>12}: {path}", "file")?;
    if type_of(attr.mode) == mode::SYMLINK {
        write!(text, " -> {}", printable(&fs.readlink(attr.id)?))?;
    }
    text.push('\n');
    let mut line = |name: &str, value: String| writeln!(text, "{name:>12}: {value}");
    line("type", type_text(attr.mode).to_owned())?;
    line("subvolume", attr.id.root.to_string())?;
    line("inode", attr.id.ino.to_string())?;
    line("size", format!("{} in {} blocks of 512", attr.size, attr.blocks))?;
    line("mode", format!("{:04o} {}", attr.mode & mode::PERMISSIONS, mode_text(attr.mode)))?;
    line("owner", format!("{}:{}", attr.uid, attr.gid))?;
    line("links", attr.nlink.to_string())?;
    if matches!(type_of(attr.mode), mode::CHAR | mode::BLOCK) {
        let (major, minor) = rdev_parts(attr.rdev);
        line("device", format!("{major}, {minor}"))?;
    }
    for (name, time) in [("access", attr.atime), ("modify", attr.mtime), ("change", attr.ctime), ("birth", attr.otime)]
    {
        line(name, format!("{} UTC", time_text(time)))?;
    }
    line("generation", attr.generation.to_string())?;
    line("flags", format!("{:#x}", attr.flags))?;
    for name in fs.listxattr(attr.id)? {
        let value = fs.getxattr(attr.id, &name)?;
        line("xattr", format!("{} ({} bytes)", printable(&name), value.len()))?;
    }
    if type_of(attr.mode) == mode::REGULAR {
        let data: u64 = data_ranges(fs, attr.id, attr.size)?.iter().map(|(_, len)| len).sum();
        if data < attr.size {
            line("holes", (attr.size - data).to_string())?;
        }
    }
    Ok(text)
}

/// A file and all its attributes as JSON.
pub(super) fn json_of(fs: &Fs, path: &[u8], attr: &Attr) -> anyhow::Result<Value> {
    let time = |time: Timespec| json!({ "sec": time.sec, "nsec": time.nsec });
    let mut value = json!({
        "type": type_text(attr.mode),
        "subvolume": attr.id.root.0,
        "inode": attr.id.ino.0,
        "size": attr.size,
        "blocks": attr.blocks,
        "mode": format!("{:04o}", attr.mode & mode::PERMISSIONS),
        "uid": attr.uid,
        "gid": attr.gid,
        "nlink": attr.nlink,
        "atime": time(attr.atime),
        "mtime": time(attr.mtime),
        "ctime": time(attr.ctime),
        "otime": time(attr.otime),
        "generation": attr.generation.0,
        "flags": attr.flags,
    });
    insert_name(&mut value, "path", path);
    match type_of(attr.mode) {
        mode::SYMLINK => insert_name(&mut value, "target", &fs.readlink(attr.id)?),
        mode::CHAR | mode::BLOCK => {
            let (major, minor) = rdev_parts(attr.rdev);
            value["device"] = json!({ "major": major, "minor": minor });
        }
        _ => {}
    }
    let names = fs.listxattr(attr.id)?;
    if !names.is_empty() {
        insert_names(&mut value, "xattrs", names.iter().map(Vec::as_slice));
    }
    Ok(value)
}
