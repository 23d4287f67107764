//! `ubtrfs subvolume list`, and the formats of a subvolume as a line, as a row of a table and as JSON.

use std::cmp::Ordering;

use serde_json::{Value, json};
use ubtrfs_format::RootId;
use ubtrfs_format::item::{RootFlags, Timespec};
use ubtrfs_format::print::insert_name;
use ubtrfs_fs::SubvolumeInfo;
use uuid::Uuid;

use super::problem::explain;
use super::{list, list_deleted};
use crate::commands::offline::text::{printable, time_text};
use crate::commands::offline::{ImageUse, LongImageOptions};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::common::{print_json, print_out};
use crate::sort::Sort;

/// List all subvolumes except the top level
///
/// Paths start at the top level. Paths of subvolumes inside the subvolume that holds PATH start at that subvolume; with
/// -a and -o, they start at the top level too.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: CommandTarget,
    /// Show only subvolumes directly in the subvolume that holds PATH
    #[arg(short = 'o')]
    only_below: bool,
    /// Put <FS_TREE>/ before the paths of subvolumes that are not directly in the subvolume that holds PATH
    #[arg(short = 'a')]
    marks_others: bool,
    #[command(flatten)]
    fields: Fields,
    /// Show only read-only subvolumes
    #[arg(short)]
    read_only: bool,
    /// Show only snapshots, with their creation times
    #[arg(short)]
    snapshots: bool,
    /// Show deleted subvolumes whose space is not free yet
    #[arg(short)]
    deleted: bool,
    /// Print a table
    #[arg(short, conflicts_with = "json")]
    table: bool,
    /// Show only subvolumes with this generation; +N for N and later, -N for N and earlier
    #[arg(short = 'G', value_name = "[+|-]N", value_parser = parse_range, allow_hyphen_values = true)]
    generation: Option<GenerationRange>,
    /// Show only subvolumes created in this generation; +N for N and later, -N for N and earlier
    #[arg(short = 'C', value_name = "[+|-]N", value_parser = parse_range, allow_hyphen_values = true)]
    created: Option<GenerationRange>,
    /// Sort by these columns: rootid, gen, ogen, path; `-` before a column sorts it in descending order
    #[arg(long, value_name = "COLUMNS", value_parser = parse_sort, allow_hyphen_values = true, default_value = "rootid")]
    sort: Sort<SubvolumeColumn>,
    /// Print JSON: a list of objects
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: LongImageOptions,
}

/// Additional fields of a line.
#[derive(clap::Args, Clone, Copy, Default)]
struct Fields {
    /// Show the id of the parent
    #[arg(short = 'p')]
    parent: bool,
    /// Show the generation in which each subvolume was created
    #[arg(short = 'c')]
    cgen: bool,
    /// Accepted for compatibility with btrfs-progs; the generation is always shown
    #[arg(short = 'g')]
    _generation: bool,
    /// Show the parent's UUID
    #[arg(short = 'q')]
    parent_uuid: bool,
    /// Show the received UUID
    #[arg(short = 'R')]
    received_uuid: bool,
    /// Show the UUID
    #[arg(short = 'u')]
    uuid: bool,
    #[arg(skip)]
    otime: bool,
}

/// The smallest and the largest generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GenerationRange(u64, u64);

impl GenerationRange {
    fn contains(self, number: u64) -> bool {
        (self.0..=self.1).contains(&number)
    }
}

fn parse_range(text: &str) -> Result<GenerationRange, String> {
    let number = |text: &str| match text.parse() {
        Ok(number) if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err("expected a generation, such as 100, +100 or -100".to_owned()),
    };
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(start), _) => Ok(GenerationRange(number(start)?, u64::MAX)),
        (_, Some(end)) => Ok(GenerationRange(0, number(end)?)),
        _ => number(text).map(|only| GenerationRange(only, only)),
    }
}

#[derive(Clone, Copy, Debug)]
enum SubvolumeColumn {
    Id,
    Generation,
    Created,
    Path,
}

fn parse_sort(text: &str) -> Result<Sort<SubvolumeColumn>, String> {
    let columns = [
        ("rootid", SubvolumeColumn::Id),
        ("gen", SubvolumeColumn::Generation),
        ("ogen", SubvolumeColumn::Created),
        ("path", SubvolumeColumn::Path),
    ];
    Sort::parse(text, &columns)
}

/// Compares two subvolumes with their paths by the columns, and by id where all of the columns are equal.
fn compare(
    sort: &Sort<SubvolumeColumn>,
    (one, path): (&SubvolumeInfo, &[u8]),
    (other, other_path): (&SubvolumeInfo, &[u8]),
) -> Ordering {
    let by_column = |column| match column {
        SubvolumeColumn::Id => one.id.cmp(&other.id),
        SubvolumeColumn::Generation => one.generation.cmp(&other.generation),
        SubvolumeColumn::Created => one.otransid.cmp(&other.otransid),
        SubvolumeColumn::Path => path.cmp(other_path),
    };
    sort.compare(by_column).then(one.id.cmp(&other.id))
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let target = args.target.clone().or_image();
    let (list, top) = with_channel(&target, &args.image.clone().into(), ImageUse::Read, |channel| {
        let file = open(channel, &target)?;
        let list = if args.deleted { list_deleted(channel, &target) } else { list(channel, &target) }?;
        let (top, _) = channel.subvolume_of(&file).map_err(|failure| explain("read", &target, failure))?;
        Ok((list, top))
    })?;
    let is_shown = |info: &SubvolumeInfo| {
        info.id != RootId::FS_TREE
            && (!args.read_only || is_read_only(info))
            && (!args.snapshots || !info.parent_uuid.is_nil())
            && (!args.only_below || args.marks_others || info.parent == Some(top.id))
            && args.generation.is_none_or(|range| range.contains(info.generation.0))
            && args.created.is_none_or(|range| range.contains(info.otransid.0))
    };
    let mut shown: Vec<SubvolumeInfo> = list.into_iter().filter(is_shown).collect();
    // As in btrfs-progs, paths are sorted as they are printed.
    let path = |info: &'_ SubvolumeInfo| relative_path(info, &top, &args).to_vec();
    shown.sort_by(|one, other| compare(&args.sort, (one, &path(one)), (other, &path(other))));
    if args.json {
        return print_json(&shown.iter().map(json_of).collect());
    }
    let cgen = args.fields.cgen || args.snapshots || args.created.is_some();
    let fields = Fields { cgen, otime: args.snapshots, ..args.fields }.shown();
    let mut text = if args.table { head(&fields) } else { String::new() };
    let format = if args.table { row } else { line };
    text.extend(shown.iter().map(|info| format(&fields, info, &path_text(info, &top, &args))));
    print_out(&text)
}

/// The path of a subvolume as btrfs-progs prints it, with a mark before it if it is asked for.
fn path_text(info: &SubvolumeInfo, top: &SubvolumeInfo, args: &Args) -> String {
    if args.deleted {
        return "DELETED".to_owned();
    }
    let mark = if args.marks_others && info.parent != Some(top.id) { "<FS_TREE>/" } else { "" };
    format!("{mark}{}", printable(relative_path(info, top, args)))
}

/// The path of a subvolume, relative to the subvolume `top` if it lies in `top` and full paths are not asked for.
fn relative_path<'i>(info: &'i SubvolumeInfo, top: &SubvolumeInfo, args: &Args) -> &'i [u8] {
    let inside = info.path.strip_prefix(top.path.as_slice()).and_then(|path| path.strip_prefix(b"/"));
    inside.filter(|_| !args.only_below && !args.marks_others).unwrap_or(&info.path)
}

/// A field of a line, which is a column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubvolumeField {
    Id,
    Generation,
    Created,
    Parent,
    TopLevel,
    Otime,
    ParentUuid,
    ReceivedUuid,
    Uuid,
    Path,
}

impl Fields {
    /// The fields to show, in the order of btrfs-progs.
    fn shown(self) -> Vec<SubvolumeField> {
        let all = [
            (true, SubvolumeField::Id),
            (true, SubvolumeField::Generation),
            (self.cgen, SubvolumeField::Created),
            (self.parent, SubvolumeField::Parent),
            (true, SubvolumeField::TopLevel),
            (self.otime, SubvolumeField::Otime),
            (self.parent_uuid, SubvolumeField::ParentUuid),
            (self.received_uuid, SubvolumeField::ReceivedUuid),
            (self.uuid, SubvolumeField::Uuid),
            (true, SubvolumeField::Path),
        ];
        all.into_iter().filter(|(is_shown, _)| *is_shown).map(|(_, field)| field).collect()
    }
}

impl SubvolumeField {
    fn name(self) -> &'static str {
        match self {
            Self::Id => "ID",
            Self::Generation => "gen",
            Self::Created => "cgen",
            Self::Parent => "parent",
            Self::TopLevel => "top level",
            Self::Otime => "otime",
            Self::ParentUuid => "parent_uuid",
            Self::ReceivedUuid => "received_uuid",
            Self::Uuid => "uuid",
            Self::Path => "path",
        }
    }

    /// The field's text. A missing UUID is padded to the width of a UUID.
    fn text(self, info: &SubvolumeInfo, path: &str) -> String {
        let wide = |uuid| format!("{:<36}", uuid_text(uuid));
        match self {
            Self::Id => info.id.0.to_string(),
            Self::Generation => info.generation.0.to_string(),
            Self::Created => info.otransid.0.to_string(),
            Self::Parent | Self::TopLevel => info.parent.map_or(0, |parent| parent.0).to_string(),
            Self::Otime => seconds_text(info.otime),
            Self::ParentUuid => wide(info.parent_uuid),
            Self::ReceivedUuid => wide(info.received_uuid),
            Self::Uuid => wide(info.uuid),
            Self::Path => path.to_owned(),
        }
    }
}

fn line(fields: &[SubvolumeField], info: &SubvolumeInfo, path: &str) -> String {
    let words: Vec<String> =
        fields.iter().map(|field| format!("{} {}", field.name(), field.text(info, path))).collect();
    format!("{}\n", words.join(" "))
}

/// The head of a table, with tabs between the columns as in btrfs-progs.
fn head(fields: &[SubvolumeField]) -> String {
    let names: String = fields.iter().map(|field| format!("{}\t", field.name())).collect();
    let dashes: String = fields.iter().map(|field| format!("{}\t", "-".repeat(field.name().len()))).collect();
    format!("{names}\n{dashes}\n")
}

fn row(fields: &[SubvolumeField], info: &SubvolumeInfo, path: &str) -> String {
    let cell = |field: &SubvolumeField| {
        let end = match field {
            SubvolumeField::Path => "\n",
            // The name of this column is wider than a tab.
            SubvolumeField::TopLevel => "\t\t",
            _ => "\t",
        };
        format!("{}{end}", field.text(info, path))
    };
    fields.iter().map(cell).collect()
}

/// Formats a line without additional fields.
pub(super) fn plain_line(info: &SubvolumeInfo) -> String {
    line(&Fields::default().shown(), info, &printable(&info.path))
}

pub(super) fn is_read_only(info: &SubvolumeInfo) -> bool {
    info.flags.contains(RootFlags::RDONLY)
}

/// Whether this is a deleted subvolume, which has no path. The top level has none either.
fn is_deleted(info: &SubvolumeInfo) -> bool {
    info.parent.is_none() && info.id != RootId::FS_TREE
}

pub(super) fn uuid_text(uuid: Uuid) -> String {
    if uuid.is_nil() { "-".to_owned() } else { uuid.to_string() }
}

/// Formats a time in UTC, with seconds.
pub(crate) fn seconds_text(time: Timespec) -> String {
    let mut text = time_text(time);
    text.truncate(text.len() - ".000000001".len());
    text
}

fn time_json(time: Timespec) -> Value {
    json!({ "sec": time.sec, "nsec": time.nsec })
}

pub(super) fn json_of(info: &SubvolumeInfo) -> Value {
    let uuid = |uuid: Uuid| if uuid.is_nil() { Value::Null } else { uuid.to_string().into() };
    let mut value = json!({
        "id": info.id.0,
        "parent": info.parent.map(|parent| parent.0),
        "dirid": info.dirid.0,
        "flags": info.flags.bits(),
        "read_only": is_read_only(info),
        "uuid": uuid(info.uuid),
        "parent_uuid": uuid(info.parent_uuid),
        "received_uuid": uuid(info.received_uuid),
        "generation": info.generation.0,
        "ctransid": info.ctransid.0,
        "otransid": info.otransid.0,
        "stransid": info.stransid.0,
        "rtransid": info.rtransid.0,
        "ctime": time_json(info.ctime),
        "otime": time_json(info.otime),
        "stime": time_json(info.stime),
        "rtime": time_json(info.rtime),
    });
    match is_deleted(info) {
        true => value["path"] = Value::Null,
        false => insert_name(&mut value, "path", &info.path),
    }
    value
}

#[cfg(test)]
mod tests {
    use ubtrfs_format::{Generation, Ino};

    use super::*;

    #[test]
    fn lines_are_those_of_btrfs_progs() {
        let uuid = "4038cbcc-8fd8-0741-a5fa-effb10cf84dd";
        let info = SubvolumeInfo {
            id: RootId(259),
            path: b"d/s".to_vec(),
            parent: Some(RootId(5)),
            dirid: Ino(256),
            flags: RootFlags::empty(),
            uuid: uuid.parse().unwrap(),
            parent_uuid: Uuid::nil(),
            received_uuid: Uuid::nil(),
            generation: Generation(8),
            otransid: Generation(7),
            ctransid: Generation(7),
            stransid: Generation(0),
            rtransid: Generation(0),
            ctime: Timespec::default(),
            stime: Timespec::default(),
            rtime: Timespec::default(),
            otime: Timespec { sec: 1_795_275_512, nsec: 1 },
        };
        assert_eq!(plain_line(&info), "ID 259 gen 8 top level 5 path d/s\n");
        let all = Fields {
            parent: true,
            cgen: true,
            parent_uuid: true,
            received_uuid: true,
            uuid: true,
            otime: true,
            ..Fields::default()
        };
        let none = format!("-{}", " ".repeat(35));
        assert_eq!(
            line(&all.shown(), &info, "d/s"),
            format!(
                "ID 259 gen 8 cgen 7 parent 5 top level 5 otime 2026-11-21 15:38:32 parent_uuid {none} received_uuid {none} uuid {uuid} path d/s\n"
            )
        );
        let some = Fields { cgen: true, ..Fields::default() }.shown();
        assert_eq!(head(&some), "ID\tgen\tcgen\ttop level\tpath\t\n--\t---\t----\t---------\t----\t\n");
        assert_eq!(row(&some, &info, "d/s"), "259\t8\t7\t5\t\td/s\n");
        assert_eq!(json_of(&info)["parent_uuid"], Value::Null);
    }

    #[test]
    fn generations_are_filtered_as_by_btrfs_progs() {
        assert_eq!(parse_range("8"), Ok(GenerationRange(8, 8)));
        assert_eq!(parse_range("+8"), Ok(GenerationRange(8, u64::MAX)));
        assert_eq!(parse_range("-8"), Ok(GenerationRange(0, 8)));
        for wrong in ["", "+", "x", "+-8", "8-", "++8"] {
            assert!(parse_range(wrong).is_err(), "{wrong}");
        }
    }
}
