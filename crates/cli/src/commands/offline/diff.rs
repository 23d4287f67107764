//! `ubtrfs diff`: tells how two files or directories of images differ.
//!
//! Invariants:
//! - I1. Two trees are equal if no line was printed and no file failed. Then the exit status is 0.
//! - I2. Memory grows with the largest directory and the depth, not with the number of files.
//! - I3. A file that cannot be read is named on stderr, and the comparison goes on with the others. Then the exit status is 2.

use std::cmp::Ordering;
use std::io::{BufWriter, Write};
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};
use ubtrfs_format::print::{insert_name, json_line};
use ubtrfs_fs::{Attr, Fs, InodeId, mode, rdev_parts};

use super::text::{mode_text, printable, time_text, type_text};
use super::{
    COPY_LEN, DirName, ImageOptions, ImagePath, ImagePathParser, ImageUse, VisitedDirs, data_ranges, is_same_image,
    lookup, push_name, read_names, type_of, with_image,
};
use crate::common::{OUTPUT_LOST, Stdout, print_error, stdout};

/// Tell how two files or directory trees of images differ
#[derive(clap::Args)]
#[command(after_help = "\
Each line begins with a sign: '-' for a file that only the first tree has, '+' for one that only the second has, and '~' for a file \
                        that differs. Then follow the path below the given ones, and what differs.

Not compared: times other than that of the last change of content, and the numbers of inodes and subvolumes.

Exit status: 0 if the trees are equal, 1 if they differ, 2 after an error.")]
pub(crate) struct Args {
    /// The first file or directory; an image alone means its root directory
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true })]
    first: ImagePath,
    /// The second one, of the same image or of another
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true })]
    second: ImagePath,
    /// Leave out what does not matter, separated by commas
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    ignore: Vec<Aspect>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// What two files can differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Aspect {
    /// Type, or whether a directory is a subvolume
    #[value(skip)]
    Type,
    /// Permissions
    Mode,
    /// Owner and group
    Owner,
    /// Number of hard links
    Links,
    /// Time of the last change of content
    Mtime,
    /// Extended attributes, with ACLs
    Xattr,
    /// Target of a symbolic link, or number of a device
    #[value(skip)]
    Target,
    /// Size
    #[value(skip)]
    Size,
    /// Data
    Content,
}

impl Aspect {
    fn name(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Mode => "mode",
            Self::Owner => "owner",
            Self::Links => "links",
            Self::Mtime => "mtime",
            Self::Xattr => "xattr",
            Self::Target => "target",
            Self::Size => "size",
            Self::Content => "content",
        }
    }
}

/// Something in which two files differ, with the values of both as text.
struct Difference {
    aspect: Aspect,
    values: Option<(String, String)>,
    /// The name of the extended attribute, or the offset of the content, that differs.
    at: String,
}

/// One of the two trees.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DiffSide {
    First,
    Second,
}

/// The difference that a line tells.
enum Told<'t> {
    /// Only one tree has it. It has this type.
    Only(DiffSide, &'static str),
    /// Both trees have it, and it differs.
    Differs(&'t [Difference]),
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let compare = |first: &Fs, second: &Fs| ImageComparison::new(args, first, second).trees();
    let open = |path: &ImagePath, work: &mut dyn FnMut(&Fs) -> anyhow::Result<DiffOutcome>| {
        with_image(&path.image, &args.image, ImageUse::Read, |fs| work(fs))
    };
    let outcome = match is_same_image(&args.first.image, &args.second.image) {
        true => open(&args.first, &mut |fs| compare(fs, fs)),
        false => open(&args.first, &mut |first| open(&args.second, &mut |second| compare(first, second))),
    };
    match outcome {
        Ok(DiffOutcome { has_failed: false, differs: false }) => ExitCode::SUCCESS,
        Ok(DiffOutcome { has_failed: false, differs: true }) => ExitCode::from(1),
        Ok(_) => ExitCode::from(TROUBLE),
        Err(error) => match print_error(&error) {
            ExitCode::FAILURE => ExitCode::from(TROUBLE),
            no_reader => no_reader,
        },
    }
}

/// The exit status after an error, as of diff(1).
const TROUBLE: u8 = 2;

#[derive(Clone, Copy, Default)]
struct DiffOutcome {
    differs: bool,
    has_failed: bool,
}

struct ImageComparison<'c> {
    args: &'c Args,
    sides: [&'c Fs; 2],
    out: BufWriter<Stdout>,
    outcome: DiffOutcome,
    buffers: [Vec<u8>; 2],
}

/// The names that a directory has in at least one of the trees.
type ComparedNames = Vec<(Vec<u8>, Pair)>;

/// Two files with one path, or a file that one tree has.
enum Pair {
    Both(InodeId, InodeId),
    Only(DiffSide, InodeId),
}

impl<'c> ImageComparison<'c> {
    fn new(args: &'c Args, first: &'c Fs, second: &'c Fs) -> Self {
        let buffers = [vec![0; COPY_LEN], vec![0; COPY_LEN]];
        Self { args, sides: [first, second], out: BufWriter::new(stdout()), outcome: DiffOutcome::default(), buffers }
    }

    /// Compares what the operands name, and everything below.
    fn trees(mut self) -> anyhow::Result<DiffOutcome> {
        // Each path shares the buffer: paths of their own would take memory that grows with the square of the depth.
        struct PendingPair {
            len: usize,
            name: Vec<u8>,
            pair: Pair,
        }
        let start = |fs: &Fs, path: &ImagePath| Ok::<_, anyhow::Error>(lookup(fs, path, path.path.ends_with(b"/"))?.id);
        let first = start(self.sides[0], &self.args.first)?;
        let second = start(self.sides[1], &self.args.second)?;
        let mut passed = VisitedDirs::default();
        let mut path = b"/".to_vec();
        let mut todo = vec![PendingPair { len: 1, name: Vec::new(), pair: Pair::Both(first, second) }];
        while let Some(PendingPair { len, name, pair }) = todo.pop() {
            path.truncate(len);
            if !name.is_empty() {
                push_name(&mut path, &name);
            }
            let below = match pair {
                Pair::Only(side, id) => {
                    self.only(side, id, &path)?;
                    ComparedNames::new()
                }
                Pair::Both(first, second) => match self.files([first, second], &path, &mut passed)? {
                    Ok(below) => below,
                    Err(error) => {
                        self.outcome.has_failed = true;
                        print_error(&error.context(format!("cannot compare {}", printable(&path))));
                        Vec::new()
                    }
                },
            };
            let len = path.len();
            todo.extend(below.into_iter().rev().map(|(name, pair)| PendingPair { len, name, pair }));
        }
        self.out.flush().context(OUTPUT_LOST)?;
        Ok(self.outcome)
    }

    /// Prints the line of a file that only one tree has. Of a directory, it prints nothing that lies below.
    fn only(&mut self, side: DiffSide, id: InodeId, path: &[u8]) -> anyhow::Result<()> {
        let kind = self.sides[side as usize].getattr(id).map_or("unknown", |attr| kind_of(&attr));
        self.tell(path, &Told::Only(side, kind))
    }

    /// Compares two files. Returns what is in them, if both are directories. An inner error is that of these files.
    fn files(
        &mut self,
        ids: [InodeId; 2],
        path: &[u8],
        passed: &mut VisitedDirs,
    ) -> anyhow::Result<anyhow::Result<ComparedNames>> {
        let found = self.differences(ids).and_then(|(differences, are_dirs)| {
            let below = if are_dirs { self.names(ids, passed)? } else { Vec::new() };
            Ok((differences, below))
        });
        let (differences, below) = match found {
            Ok(found) => found,
            Err(error) => return Ok(Err(error)),
        };
        if !differences.is_empty() {
            self.tell(path, &Told::Differs(&differences))?;
        }
        Ok(Ok(below))
    }

    /// The names of two directories, in order.
    fn names(&self, [first, second]: [InodeId; 2], passed: &mut VisitedDirs) -> anyhow::Result<ComparedNames> {
        passed.pass(first)?;
        let one = read_names(self.sides[0], first)?;
        let other = read_names(self.sides[1], second)?;
        let mut pairs = Vec::with_capacity(one.len().max(other.len()));
        let (mut one, mut other) = (one.into_iter().peekable(), other.into_iter().peekable());
        loop {
            let order = match (one.peek(), other.peek()) {
                (Some(one), Some(other)) => one.name.cmp(&other.name),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => return Ok(pairs),
            };
            let first = if order == Ordering::Greater { None } else { one.next() };
            let second = if order == Ordering::Less { None } else { other.next() };
            pairs.extend(match (first, second) {
                (Some(DirName { name, id }), Some(second)) => Some((name, Pair::Both(id, second.id))),
                (Some(DirName { name, id }), None) => Some((name, Pair::Only(DiffSide::First, id))),
                (None, Some(DirName { name, id })) => Some((name, Pair::Only(DiffSide::Second, id))),
                (None, None) => None,
            });
        }
    }

    /// What two files differ in, and whether both are directories.
    fn differences(&mut self, ids: [InodeId; 2]) -> anyhow::Result<(Vec<Difference>, bool)> {
        let [fs, other_fs] = self.sides;
        let (one, other) = (fs.getattr(ids[0])?, other_fs.getattr(ids[1])?);
        let mut found = Vec::new();
        let mut compare = |aspect: Aspect, values: (String, String)| {
            if values.0 != values.1 && !self.args.ignore.contains(&aspect) {
                found.push(Difference { aspect, values: Some(values), at: String::new() });
            }
        };
        let both = |value: &dyn Fn(&Attr) -> String| (value(&one), value(&other));
        compare(Aspect::Type, both(&|attr| kind_of(attr).to_owned()));
        compare(Aspect::Mode, both(&|attr| mode_text(attr.mode)[1..].to_owned()));
        compare(Aspect::Owner, both(&|attr| format!("{}:{}", attr.uid, attr.gid)));
        if type_of(one.mode) != type_of(other.mode) {
            return Ok((found, false));
        }
        let is_dir = one.is_dir();
        if !is_dir {
            compare(Aspect::Links, both(&|attr| attr.nlink.to_string()));
        }
        compare(Aspect::Mtime, both(&|attr| time_text(attr.mtime)));
        match type_of(one.mode) {
            mode::SYMLINK => {
                let target = |fs: &Fs, id| fs.readlink(id).map(|target| printable(&target));
                compare(Aspect::Target, (target(fs, ids[0])?, target(other_fs, ids[1])?));
            }
            mode::CHAR | mode::BLOCK => {
                let number = |attr: &Attr| {
                    let (major, minor) = rdev_parts(attr.rdev);
                    format!("{major}:{minor}")
                };
                compare(Aspect::Target, both(&number));
            }
            mode::REGULAR => compare(Aspect::Size, both(&|attr| attr.size.to_string())),
            _ => {}
        }
        if !self.args.ignore.contains(&Aspect::Xattr) {
            found.extend(self.xattrs(ids)?);
        }
        let is_file = type_of(one.mode) == mode::REGULAR;
        if is_file
            && !self.args.ignore.contains(&Aspect::Content)
            && let Some(offset) = self.first_other_byte(ids, one.size.min(other.size))?
        {
            found.push(Difference { aspect: Aspect::Content, values: None, at: format!("byte {offset}") });
        }
        Ok((found, is_dir))
    }

    fn xattrs(&self, ids: [InodeId; 2]) -> anyhow::Result<Vec<Difference>> {
        let mut all = self.sides[0].listxattr(ids[0])?;
        all.extend(self.sides[1].listxattr(ids[1])?);
        all.sort_unstable();
        all.dedup();
        let mut found = Vec::new();
        for name in all {
            let value = |side: usize| match self.sides[side].getxattr(ids[side], &name) {
                Ok(value) => Ok(Some(printable(&value))),
                Err(ubtrfs_fs::Error::NoData) => Ok(None),
                Err(error) => Err(error),
            };
            let (one, other) = (value(0)?, value(1)?);
            if one != other {
                let [one, other] = [one, other].map(|value| value.unwrap_or_else(|| "absent".to_owned()));
                found.push(Difference { aspect: Aspect::Xattr, values: Some((one, other)), at: printable(&name) });
            }
        }
        Ok(found)
    }

    /// The offset of the first byte that differs below `end`. Ranges that are holes in both files are not read.
    fn first_other_byte(&mut self, ids: [InodeId; 2], end: u64) -> anyhow::Result<Option<u64>> {
        let mut ranges = data_ranges(self.sides[0], ids[0], end)?;
        ranges.extend(data_ranges(self.sides[1], ids[1], end)?);
        ranges.sort_unstable();
        let mut at = 0;
        for (start, len) in ranges {
            at = at.max(start);
            let end = start.saturating_add(len);
            while at < end {
                let len = COPY_LEN.min(usize::try_from(end - at).unwrap_or(COPY_LEN));
                let [one, other] = &mut self.buffers;
                for (side, buffer) in [&mut *one, &mut *other].into_iter().enumerate() {
                    let count = self.sides[side].read_into(ids[side], at, &mut buffer[..len])?;
                    buffer[count..len].fill(0);
                }
                if let Some(other) = one[..len].iter().zip(&other[..len]).position(|(one, other)| one != other) {
                    return Ok(Some(at + other as u64));
                }
                at += len as u64;
            }
        }
        Ok(None)
    }

    /// Prints a line.
    fn tell(&mut self, path: &[u8], told: &Told<'_>) -> anyhow::Result<()> {
        self.outcome.differs = true;
        let line = match self.args.json {
            true => format!("{}\n", json_line(&as_json(path, told))),
            false => as_text(path, told),
        };
        self.out.write_all(line.as_bytes()).context(OUTPUT_LOST)
    }
}

/// The type of a file; a subvolume is a type of its own.
fn kind_of(attr: &Attr) -> &'static str {
    match attr.is_dir() && attr.id.ino == ubtrfs_format::Ino::ROOT_DIR {
        true => "subvolume",
        false => type_text(attr.mode),
    }
}

fn as_text(path: &[u8], told: &Told<'_>) -> String {
    let path = printable(path);
    let differences = match told {
        Told::Only(DiffSide::First, kind) => return format!("- {path} ({kind})\n"),
        Told::Only(DiffSide::Second, kind) => return format!("+ {path} ({kind})\n"),
        Told::Differs(differences) => differences,
    };
    let all = differences.iter().map(|Difference { aspect, values, at }| {
        let name = aspect.name();
        let gap = if at.is_empty() { "" } else { " " };
        match values {
            Some((one, other)) => format!("{name}{gap}{at} {one} -> {other}"),
            None => format!("{name} from {at}"),
        }
    });
    format!("~ {path}: {}\n", all.collect::<Vec<_>>().join(", "))
}

fn as_json(path: &[u8], told: &Told<'_>) -> Value {
    let difference = |difference: &Difference| {
        let mut value = json!({ "what": difference.aspect.name() });
        if !difference.at.is_empty() {
            value["at"] = json!(difference.at);
        }
        if let Some((one, other)) = &difference.values {
            value["first"] = json!(one);
            value["second"] = json!(other);
        }
        value
    };
    let mut value = match told {
        Told::Only(DiffSide::First, kind) => json!({ "in": "first", "type": kind }),
        Told::Only(DiffSide::Second, kind) => json!({ "in": "second", "type": kind }),
        Told::Differs(differences) => {
            json!({ "in": "both", "differences": differences.iter().map(difference).collect::<Vec<_>>() })
        }
    };
    insert_name(&mut value, "path", path);
    value
}
