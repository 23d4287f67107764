//! `ubtrfs subvolume list`, and the formats of a subvolume as a line and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use ubtrfs_format::RootId;
use ubtrfs_format::item::{RootFlags, Timespec};
use ubtrfs_fs::SubvolumeInfo;
use uuid::Uuid;

use super::list;
use crate::commands::offline::text::{printable, time_text};
use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, open, with_channel};
use crate::common::print_out;

/// List all subvolumes except the top level
#[derive(clap::Args)]
pub(super) struct Args {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: Target,
    #[command(flatten)]
    fields: Fields,
    /// Show only read-only subvolumes
    #[arg(short)]
    read_only: bool,
    /// Show only snapshots, with their creation times
    #[arg(short)]
    snapshots: bool,
    /// Print JSON: a list of objects
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Additional fields of a line.
#[derive(clap::Args, Clone, Copy, Default)]
struct Fields {
    /// Show the generation in which each subvolume was created
    #[arg(short = 'c')]
    cgen: bool,
    /// Show the parent's UUID
    #[arg(short = 'q')]
    parent_uuid: bool,
    /// Show the received UUID
    #[arg(short = 'R')]
    received_uuid: bool,
    /// Show the UUID
    #[arg(short = 'u')]
    uuid: bool,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let target = args.target.or_image();
    let list = with_channel(&target, &args.image, Use::Read, |channel| {
        open(channel, &target)?;
        list(channel, &target)
    })?;
    let shown = list.iter().filter(|info| {
        info.id != RootId::FS_TREE
            && (!args.read_only || is_read_only(info))
            && (!args.snapshots || !info.parent_uuid.is_nil())
    });
    if args.json {
        return print_out(&format!("{:#}\n", shown.map(json_of).collect::<Value>()));
    }
    let fields = Fields { cgen: args.fields.cgen || args.snapshots, ..args.fields };
    let mut text = String::new();
    for info in shown {
        line(&mut text, info, fields, args.snapshots)?;
    }
    print_out(&text)
}

/// Appends a line in the format of btrfs-progs. A missing UUID is padded to the width of a UUID.
fn line(text: &mut String, info: &SubvolumeInfo, fields: Fields, otime: bool) -> std::fmt::Result {
    let wide = |uuid| format!("{:<36}", uuid_text(uuid));
    write!(text, "ID {} gen {}", info.id.0, info.generation.0)?;
    if fields.cgen {
        write!(text, " cgen {}", info.otransid.0)?;
    }
    write!(text, " top level {}", info.parent.map_or(0, |parent| parent.0))?;
    if otime {
        write!(text, " otime {}", seconds_text(info.otime))?;
    }
    if fields.parent_uuid {
        write!(text, " parent_uuid {}", wide(info.parent_uuid))?;
    }
    if fields.received_uuid {
        write!(text, " received_uuid {}", wide(info.received_uuid))?;
    }
    if fields.uuid {
        write!(text, " uuid {}", wide(info.uuid))?;
    }
    writeln!(text, " path {}", printable(&info.path))
}

/// Formats a line without additional fields.
pub(super) fn plain_line(info: &SubvolumeInfo) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = line(&mut text, info, Fields::default(), false);
    text
}

pub(super) fn is_read_only(info: &SubvolumeInfo) -> bool {
    info.flags.contains(RootFlags::RDONLY)
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
        "path": String::from_utf8_lossy(&info.path),
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
    if std::str::from_utf8(&info.path).is_err() {
        // The field `path` contains replacement characters, so add the exact bytes.
        value["path_hex"] = ubtrfs_format::node::hex(&info.path).into();
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
        let all = Fields { cgen: true, parent_uuid: true, received_uuid: true, uuid: true };
        let mut text = String::new();
        line(&mut text, &info, all, true).unwrap();
        let none = format!("-{}", " ".repeat(35));
        assert_eq!(
            text,
            format!(
                "ID 259 gen 8 cgen 7 top level 5 otime 2026-11-21 15:38:32 parent_uuid {none} received_uuid {none} uuid {uuid} path d/s\n"
            )
        );
        assert_eq!(json_of(&info)["parent_uuid"], Value::Null);
    }
}
