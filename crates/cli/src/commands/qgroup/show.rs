//! `ubtrfs qgroup show`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

use anyhow::bail;
use serde_json::{Value, json};
use ubtrfs_control::Channel;
use ubtrfs_control::quota::{QuotaGroup, Request, Response};
use ubtrfs_format::print::insert_name;
use ubtrfs_fs::QgroupId;

use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::commands::quota::{call, status_of};
use crate::common::{print_err, print_json, print_out, print_progs_json};
use crate::progs::is_progs;
use crate::sort::Sort;
use crate::units::Units;

/// Show quota groups
#[derive(clap::Args)]
pub(super) struct Args {
    /// Show the parents of each group
    #[arg(short = 'p')]
    parent: bool,
    /// Show the members of each group
    #[arg(short = 'c')]
    child: bool,
    /// Show the limit of referenced bytes
    #[arg(short = 'r')]
    max_referenced: bool,
    /// Show the limit of exclusive bytes
    #[arg(short = 'e')]
    max_exclusive: bool,
    /// Show only the group of the path's subvolume and the groups above it
    #[arg(short = 'F')]
    all_of_path: bool,
    /// Show only the group of the path's subvolume
    #[arg(short = 'f')]
    own_of_path: bool,
    /// Sort by these columns: qgroupid, path, rfer, excl, max_rfer, max_excl; `-` before a column sorts it in
    /// descending order
    #[arg(long, value_name = "COLUMNS", value_parser = parse_sort, allow_hyphen_values = true, default_value = "qgroupid")]
    sort: Sort<QgroupColumn>,
    /// Write all changes first, for exact numbers
    #[arg(long)]
    sync: bool,
    #[command(flatten)]
    units: Units,
    /// Print each group below the groups that it belongs to
    #[arg(long, conflicts_with = "json")]
    tree: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QgroupColumn {
    Id,
    Path,
    Referenced,
    Exclusive,
    MaxReferenced,
    MaxExclusive,
}

fn parse_sort(text: &str) -> Result<Sort<QgroupColumn>, String> {
    let columns = [
        ("qgroupid", QgroupColumn::Id),
        ("path", QgroupColumn::Path),
        ("rfer", QgroupColumn::Referenced),
        ("excl", QgroupColumn::Exclusive),
        ("max_rfer", QgroupColumn::MaxReferenced),
        ("max_excl", QgroupColumn::MaxExclusive),
    ];
    Sort::parse(text, &columns)
}

/// A group, and its text in the column `Path`.
struct QgroupRow {
    group: QuotaGroup,
    path: Path,
}

/// The path of the subvolume of a group, or a note in angle brackets.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    Of(Vec<u8>),
    Note(String),
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(path) => f.write_str(&printable(path)),
            Self::Note(note) => f.write_str(note),
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.path.clone().or_image();
    let usage = if args.sync { ImageUse::Write } else { ImageUse::Read };
    let rows = with_channel(&target, &args.image, usage, |channel| rows(channel, &target, args))?;
    if args.json {
        let groups: Vec<Value> = rows.iter().map(json_of).collect();
        return match is_progs() {
            true => print_progs_json("qgroup-show", &groups.into()),
            false => print_json(&json!({ "qgroup-show": groups })),
        };
    }
    print_out(&if args.tree { tree(&rows, args) } else { table(&rows, args) })
}

fn rows(channel: &Channel<'_>, target: &CommandTarget, args: &Args) -> anyhow::Result<Vec<QgroupRow>> {
    let file = open(channel, target)?;
    if args.sync {
        channel.sync()?;
    }
    let mut groups = all_groups(channel, target)?;
    let status = status_of(channel, target)?;
    if let Some(status) = status {
        if status.rescan.is_some() {
            print_err("WARNING: rescan is running, qgroup data may be incorrect");
        } else if !status.consistent {
            print_err("WARNING: qgroup data inconsistent, rescan recommended");
        }
    }
    if args.all_of_path || args.own_of_path {
        let own = channel.subvolume_of(&file)?.0.id.0;
        let shown = if args.all_of_path { above(&groups, own) } else { BTreeSet::from([own]) };
        groups.retain(|group| shown.contains(&group.id));
    }
    let paths: BTreeMap<u64, Vec<u8>> = channel.subvolumes()?.into_iter().map(|info| (info.id.0, info.path)).collect();
    let is_simple = status.is_some_and(|status| status.simple);
    let row = |group: QuotaGroup| QgroupRow { path: path_of(&group, &paths, is_simple), group };
    let mut rows: Vec<QgroupRow> = groups.into_iter().map(row).collect();
    rows.sort_by(|one, other| {
        let (a, b) = (&one.group, &other.group);
        // As in btrfs-progs, groups without a limit come before groups with one.
        args.sort.compare(|column| match column {
            QgroupColumn::Id => a.id.cmp(&b.id),
            QgroupColumn::Path => one.path.to_string().cmp(&other.path.to_string()),
            QgroupColumn::Referenced => a.referenced.cmp(&b.referenced),
            QgroupColumn::Exclusive => a.exclusive.cmp(&b.exclusive),
            QgroupColumn::MaxReferenced => a.max_referenced.cmp(&b.max_referenced),
            QgroupColumn::MaxExclusive => a.max_exclusive.cmp(&b.max_exclusive),
        })
    });
    Ok(rows)
}

/// All groups by id.
pub(in crate::commands) fn all_groups(
    channel: &Channel<'_>,
    target: &CommandTarget,
) -> anyhow::Result<Vec<QuotaGroup>> {
    let (mut groups, mut from) = (Vec::new(), 0);
    loop {
        let Response::Groups(page) = call(channel, target, "read the quota groups of", Request::Groups { from })?
        else {
            bail!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs");
        };
        let next = page.last().and_then(|last| last.id.checked_add(1)).filter(|next| *next > from);
        groups.extend(page);
        let Some(next) = next else { return Ok(groups) };
        from = next;
    }
}

/// A group and all groups above it.
fn above(groups: &[QuotaGroup], own: u64) -> BTreeSet<u64> {
    let (mut found, mut open) = (BTreeSet::new(), vec![own]);
    while let Some(id) = open.pop() {
        if found.insert(id) {
            open.extend(groups.iter().filter(|group| group.id == id).flat_map(|group| &group.parents));
        }
    }
    found
}

fn path_of(group: &QuotaGroup, paths: &BTreeMap<u64, Vec<u8>>, is_simple: bool) -> Path {
    Path::Note(match paths.get(&group.id) {
        _ if QgroupId(group.id).level() > 0 => {
            let nr = group.members.len();
            format!("<{nr} member qgroup{}>", if nr == 1 { "" } else { "s" })
        }
        Some(path) if path.is_empty() => "<toplevel>".to_owned(),
        Some(path) => return Path::Of(path.clone()),
        // Simple quotas charge extents to a deleted subvolume as long as other subvolumes use them.
        None if is_simple && group.referenced > 0 => "<squota space holder>".to_owned(),
        None => "<stale>".to_owned(),
    })
}

fn ids(ids: &[u64]) -> String {
    match ids {
        [] => "-".to_owned(),
        ids => ids.iter().map(|id| QgroupId(*id).to_string()).collect::<Vec<_>>().join(","),
    }
}

fn size(bytes: u64, args: &Args) -> String {
    args.units.format(bytes)
}

fn limit(bytes: Option<u64>, args: &Args) -> String {
    bytes.map_or_else(|| "none".to_owned(), |bytes| size(bytes, args))
}

/// A column: its heading, its least width, its cells, and whether they align right.
type Cells = (&'static str, usize, Vec<String>, bool);

fn table(rows: &[QgroupRow], args: &Args) -> String {
    let cells = |cell: &dyn Fn(&QgroupRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let mut columns: Vec<Cells> = vec![
        ("Qgroupid", 10, cells(&|row| QgroupId(row.group.id).to_string()), false),
        ("Referenced", 11, cells(&|row| size(row.group.referenced, args)), true),
        ("Exclusive", 12, cells(&|row| size(row.group.exclusive, args)), true),
    ];
    if args.max_referenced {
        columns.push(("Max referenced", 15, cells(&|row| limit(row.group.max_referenced, args)), true));
    }
    if args.max_exclusive {
        columns.push(("Max exclusive", 14, cells(&|row| limit(row.group.max_exclusive, args)), true));
    }
    if args.parent {
        columns.push(("Parent", 8, cells(&|row| ids(&row.group.parents)), false));
    }
    if args.child {
        columns.push(("Child", 5, cells(&|row| ids(&row.group.members)), false));
    }
    columns.push(("  Path", 0, cells(&|row| format!("  {}", row.path)), false));
    let widths: Vec<usize> = columns
        .iter()
        .map(|(_, least, cells, _)| cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0).max(*least))
        .collect();
    let mut text = String::new();
    let mut line = |words: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((word, width), (.., right)) in words.zip(&widths).zip(&columns) {
            // Writing to a string does not fail.
            let _ = if *right { write!(line, "{word:>width$} ") } else { write!(line, "{word:<width$} ") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(&mut columns.iter().map(|(head, ..)| *head));
    let dashes: Vec<String> =
        columns.iter().map(|(head, ..)| head.replace(|letter| letter != ' ', "-").replace("- -", "---")).collect();
    line(&mut dashes.iter().map(String::as_str));
    for at in 0..rows.len() {
        line(&mut columns.iter().map(|(_, _, cells, _)| cells[at].as_str()));
    }
    text
}

/// Formats the groups as a tree: first-level lines are groups without a shown parent, and members are indented
/// below their groups.
fn tree(rows: &[QgroupRow], args: &Args) -> String {
    let by_id: BTreeMap<u64, &QgroupRow> = rows.iter().map(|row| (row.group.id, row)).collect();
    let mut text = String::new();
    // Members have a lower level than their groups, so every walk down ends.
    let mut open: Vec<(&QgroupRow, usize)> = rows
        .iter()
        .rev()
        .filter(|row| !row.group.parents.iter().any(|id| by_id.contains_key(id)))
        .map(|row| (row, 0))
        .collect();
    while let Some((row, depth)) = open.pop() {
        let group = &row.group;
        let _ = write!(text, "{:indent$}{} ", "", QgroupId(group.id), indent = 2 * depth);
        let _ = write!(text, "referenced {} exclusive {}", size(group.referenced, args), size(group.exclusive, args));
        if args.max_referenced {
            let _ = write!(text, " max referenced {}", limit(group.max_referenced, args));
        }
        if args.max_exclusive {
            let _ = write!(text, " max exclusive {}", limit(group.max_exclusive, args));
        }
        let _ = writeln!(text, " {}", row.path);
        open.extend(group.members.iter().rev().filter_map(|id| by_id.get(id)).map(|row| (*row, depth + 1)));
    }
    text
}

fn json_of(row: &QgroupRow) -> Value {
    let group = &row.group;
    let limit = |bytes: Option<u64>| bytes.map_or_else(|| json!("none"), |bytes| json!(bytes));
    let ids = |ids: &[u64]| ids.iter().map(|id| json!(QgroupId(*id).to_string())).collect::<Value>();
    let mut value = json!({
        "qgroupid": QgroupId(group.id).to_string(),
        "referenced": group.referenced,
        "max_referenced": limit(group.max_referenced),
        "exclusive": group.exclusive,
        "max_exclusive": limit(group.max_exclusive),
        "parents": ids(&group.parents),
        "children": ids(&group.members),
    });
    match &row.path {
        Path::Of(path) => insert_name(&mut value, "path", path),
        Path::Note(note) => value["path"] = json!(note),
    }
    value
}
