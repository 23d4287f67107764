//! `ubtrfs find`: lists the files below a directory of an image that meet conditions.

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::Context;
use ubtrfs_format::print::json_line;
use ubtrfs_fs::{Attr, Fs, mode};

use super::list::json_of;
use super::operands::{Patterns, for_each_file, worst};
use super::text::printable;
use super::walk::{Visited, walk};
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, lookup, type_of};
use crate::common::{OUTPUT_LOST, Shown, stdout};
use ubtrfs_archive::glob::matches;

/// Find files in an image by name and type
#[derive(clap::Args)]
#[command(
    after_help = "Prints IMAGE:/PATH of each file that meets all conditions, a directory before its content, in the order of names. \
                        Symbolic links are not followed. As with find, options may have one dash: -name '*.conf' -type f."
)]
pub(crate) struct Args {
    /// Directories or files in images; an image alone means its root directory
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true }, required = true)]
    paths: Vec<ImagePath>,
    /// The name matches this pattern with *, ? and [...]
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true)]
    name: Option<OsString>,
    /// The file has one of these types, separated by commas: f (file), d (directory), l (symbolic link), b, c, p, s
    #[arg(long = "type", value_name = "TYPES", value_parser = parse_types)]
    types: Option<Types>,
    /// Go at most this many directories down; 0 means the given paths alone
    #[arg(long = "maxdepth", value_name = "N")]
    max_depth: Option<usize>,
    /// Leave out files less than this many directories down
    #[arg(long = "mindepth", value_name = "N", default_value_t = 0)]
    min_depth: usize,
    /// End each path with a zero byte instead of a newline, and escape nothing
    #[arg(long)]
    print0: bool,
    /// Print JSON, one object a line
    #[arg(long, conflicts_with = "print0")]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Type bits of modes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Types(Vec<u32>);

fn parse_types(text: &str) -> Result<Types, String> {
    let bits = |letter: &str| {
        Ok(match letter {
            "f" => mode::REGULAR,
            "d" => mode::DIRECTORY,
            "l" => mode::SYMLINK,
            "b" => mode::BLOCK,
            "c" => mode::CHAR,
            "p" => mode::FIFO,
            "s" => mode::SOCKET,
            _ => return Err(format!("'{letter}' is not a type; give one of: f, d, l, b, c, p, s")),
        })
    };
    text.split(',').map(bits).collect::<Result<_, _>>().map(Types)
}

/// Replaces options with one dash, as find has them, by those with two.
pub(crate) fn with_long_options(mut args: Vec<OsString>) -> Vec<OsString> {
    if args.get(1).is_none_or(|command| command != "find") {
        return args;
    }
    let mut at = 2;
    while let Some(arg) = args.get_mut(at) {
        let has_value = matches!(arg.to_str(), Some("-name" | "-type" | "-maxdepth" | "-mindepth"));
        if has_value || arg == "-print0" {
            let mut long = OsString::from("-");
            long.push(&*arg);
            *arg = long;
        }
        at += 1 + usize::from(has_value);
    }
    args
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let max_depth = args.max_depth.unwrap_or(usize::MAX);
    let mut below = ExitCode::SUCCESS;
    let done = for_each_file(&args.paths, &args.image, ImageUse::Read, Patterns::Match, |fs, path| {
        let start = lookup(fs, path, path.path.ends_with(b"/"))?;
        let mut out = BufWriter::new(stdout());
        let walked = walk(fs, (path, start), max_depth, "read", |file| {
            if file.depth < args.min_depth || !args.wants(file.path, file.attr) {
                return Ok(Ok(()));
            }
            match args.line(fs, path, file) {
                Ok(line) => out.write_all(&line).context(OUTPUT_LOST).map(Ok),
                Err(error) => Ok(Err(error)),
            }
        });
        out.flush().context(OUTPUT_LOST)?;
        below = worst(below, walked?);
        Ok(())
    });
    Ok(worst(done, below))
}

impl Args {
    /// The line about a file.
    fn line(&self, fs: &Fs, start: &ImagePath, file: &Visited<'_>) -> anyhow::Result<Vec<u8>> {
        if self.json {
            return Ok(format!("{}\n", json_line(&json_of(fs, file.path, file.attr)?)).into_bytes());
        }
        if self.print0 {
            return Ok([start.image.as_os_str().as_bytes(), b":", file.path, b"\0"].concat());
        }
        Ok(format!("{}:{}\n", start.image.shown(), printable(file.path)).into_bytes())
    }

    fn wants(&self, path: &[u8], attr: &Attr) -> bool {
        // The name of the root directory is `/`, as in find.
        let name = path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty()).unwrap_or(b"/");
        self.types.as_ref().is_none_or(|types| types.0.contains(&type_of(attr.mode)))
            && self.name.as_ref().is_none_or(|pattern| matches(pattern.as_bytes(), name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_may_have_one_dash() {
        let of = |args: &str| {
            let args = with_long_options(args.split(' ').map(OsString::from).collect());
            args.join(" ".as_ref()).into_string().unwrap()
        };
        assert_eq!(of("ubtrfs find i:/ -name -name -type f"), "ubtrfs find i:/ --name -name --type f");
        assert_eq!(of("ubtrfs find -maxdepth 1 i:/ -print0"), "ubtrfs find --maxdepth 1 i:/ --print0");
        assert_eq!(of("ubtrfs find --name x i:/ -name"), "ubtrfs find --name x i:/ --name");
        assert_eq!(of("ubtrfs ls -name"), "ubtrfs ls -name");
    }
}
