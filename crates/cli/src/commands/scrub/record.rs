//! The file in which the last scrub of a filesystem is kept, in the format and, for root, at the place of btrfs-progs.
//!
//! ```text
//! scrub status:1
//! FSID:DEVID|data_extents_scrubbed:0|...|last_physical:0|t_start:0|t_resumed:0|duration:0|canceled:0|finished:1
//! ```
//!
//! Invariants:
//! - I1. The file is replaced as a whole, so a reader never sees a part of it.
//! - I2. A scrub of some devices keeps the lines of the others.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use ubtrfs_control::scrub::Counts;
use uuid::Uuid;

/// The last scrub of each device of a filesystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ScrubRecord {
    pub(super) devices: BTreeMap<u64, DeviceScrubRecord>,
}

/// The last scrub of a device. Times are seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceScrubRecord {
    pub(super) counts: Counts,
    pub(super) started: u64,
    /// 0 if it was not resumed.
    pub(super) resumed: u64,
    /// Seconds of work.
    pub(super) duration: u64,
    pub(super) is_cancelled: bool,
    pub(super) is_finished: bool,
}

impl DeviceScrubRecord {
    /// Whether a scrub can go on where this one stopped.
    pub(super) fn can_resume(&self) -> bool {
        (self.is_cancelled || !self.is_finished) && self.started > 0
    }

    /// Where the next scrub begins if it resumes this one.
    pub(super) fn resume_at(&self) -> u64 {
        self.counts.last_physical
    }

    /// The sum of this record and further counts of the same scrub.
    pub(super) fn plus(mut self, more: &Counts) -> Self {
        let mut sums = self.counts;
        for ((_, sum), (_, value)) in fields_mut(&mut sums).into_iter().zip(fields(more)) {
            *sum = sum.saturating_add(value);
        }
        self.counts = Counts { last_physical: more.last_physical, ..sums };
        self
    }
}

/// The counts with their names in the file, in its order.
pub(super) fn fields(counts: &Counts) -> [(&'static str, u64); 14] {
    let mut counts = *counts;
    fields_mut(&mut counts).map(|(name, value)| (name, *value))
}

/// The counts of [`fields`], to be changed.
fn fields_mut(counts: &mut Counts) -> [(&'static str, &mut u64); 14] {
    [
        ("data_extents_scrubbed", &mut counts.data_extents_scrubbed),
        ("tree_extents_scrubbed", &mut counts.tree_extents_scrubbed),
        ("data_bytes_scrubbed", &mut counts.data_bytes_scrubbed),
        ("tree_bytes_scrubbed", &mut counts.tree_bytes_scrubbed),
        ("read_errors", &mut counts.read_errors),
        ("csum_errors", &mut counts.csum_errors),
        ("verify_errors", &mut counts.verify_errors),
        ("no_csum", &mut counts.no_csum),
        ("csum_discards", &mut counts.csum_discards),
        ("super_errors", &mut counts.super_errors),
        ("malloc_errors", &mut counts.malloc_errors),
        ("uncorrectable_errors", &mut counts.uncorrectable_errors),
        ("corrected_errors", &mut counts.corrected_errors),
        ("last_physical", &mut counts.last_physical),
    ]
}

/// Reads the record of a filesystem; an empty one if it was never scrubbed.
///
/// # Errors
/// The file cannot be read, or is not understood.
pub(super) fn read(fsid: Uuid) -> io::Result<ScrubRecord> {
    match fs::read_to_string(path_of(fsid)?) {
        Ok(text) => parse(fsid, &text).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ScrubRecord::default()),
        Err(error) => Err(error),
    }
}

/// Writes the record of a filesystem (I1).
pub(super) fn write(fsid: Uuid, record: &ScrubRecord) -> io::Result<()> {
    let path = path_of(fsid)?;
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let mut beside = path.clone().into_os_string();
    beside.push("_tmp");
    fs::write(&beside, text_of(fsid, record))?;
    fs::rename(&beside, &path)
}

/// The path of the record: that of btrfs-progs for root, a directory of the user for others.
pub(super) fn path_of(fsid: Uuid) -> io::Result<PathBuf> {
    let dir = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/var/lib/btrfs"),
        false => {
            let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
            let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
            state.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "set HOME or XDG_STATE_HOME"))?.join("btrfs")
        }
    };
    Ok(dir.join(format!("scrub.status.{fsid}")))
}

fn text_of(fsid: Uuid, record: &ScrubRecord) -> String {
    let mut text = String::from(HEAD);
    for (devid, device) in &record.devices {
        text += &format!("{fsid}:{devid}");
        for (name, value) in fields(&device.counts) {
            text += &format!("|{name}:{value}");
        }
        let DeviceScrubRecord { started, resumed, duration, is_cancelled, is_finished, .. } = device;
        let (cancelled, finished) = (u8::from(*is_cancelled), u8::from(*is_finished));
        text += &format!(
            "|t_start:{started}|t_resumed:{resumed}|duration:{duration}|canceled:{cancelled}|finished:{finished}\n"
        );
    }
    text
}

/// `None` if the text is not understood. Unknown fields are left out.
fn parse(fsid: Uuid, text: &str) -> Option<ScrubRecord> {
    let mut record = ScrubRecord::default();
    for line in text.strip_prefix(HEAD)?.lines().filter(|line| !line.is_empty()) {
        let mut parts = line.split('|');
        let devid = parts.next()?.strip_prefix(&fsid.to_string())?.strip_prefix(':')?.parse().ok()?;
        let mut device = DeviceScrubRecord::default();
        for part in parts {
            let (name, value) = part.split_once(':')?;
            let value: u64 = value.parse().ok()?;
            match name {
                "t_start" => device.started = value,
                "t_resumed" => device.resumed = value,
                "duration" => device.duration = value,
                "canceled" => device.is_cancelled = value != 0,
                "finished" => device.is_finished = value != 0,
                _ => {
                    let mut fields = fields_mut(&mut device.counts).into_iter();
                    if let Some((_, field)) = fields.find(|(field, _)| *field == name) {
                        *field = value;
                    }
                }
            }
        }
        record.devices.insert(devid, device);
    }
    Some(record)
}

const HEAD: &str = "scrub status:1\n";

#[cfg(test)]
mod tests {
    use super::*;

    const FSID: Uuid = Uuid::from_u128(0x1234);

    /// A line that btrfs-progs wrote.
    const LINE: &str = "|data_extents_scrubbed:110|tree_extents_scrubbed:14|data_bytes_scrubbed:6062080|\
        tree_bytes_scrubbed:57344|read_errors:1|csum_errors:2|verify_errors:3|no_csum:4|csum_discards:0|super_errors:5|\
        malloc_errors:0|uncorrectable_errors:6|corrected_errors:7|last_physical:30408704|t_start:1795887099|\
        t_resumed:8|duration:9|canceled:1|finished:1\n";

    #[test]
    fn a_record_of_btrfs_progs_comes_back_byte_by_byte() {
        let text = format!("{HEAD}{FSID}:1{LINE}{FSID}:3{LINE}");
        let record = parse(FSID, &text).unwrap();
        assert_eq!(text_of(FSID, &record), text);
        let device = record.devices[&3];
        assert_eq!((device.counts.csum_errors, device.counts.last_physical), (2, 30_408_704));
        assert_eq!((device.resumed, device.duration, device.can_resume()), (8, 9, true));
    }

    #[test]
    fn other_files_are_not_understood() {
        for wrong in ["", "scrub status:2\n", &format!("{HEAD}x"), &format!("{HEAD}{FSID}:1|t_start:x")] {
            assert_eq!(parse(FSID, wrong), None, "{wrong}");
        }
        let newer = format!("{HEAD}{FSID}:1|new_count:5|finished:1\n");
        assert!(parse(FSID, &newer).unwrap().devices[&1].is_finished);
    }

    #[test]
    fn counts_of_a_resumed_scrub_add_up() {
        let counts = Counts { csum_errors: 2, data_bytes_scrubbed: 10, last_physical: 100, ..Counts::default() };
        let sum =
            DeviceScrubRecord { counts, ..DeviceScrubRecord::default() }.plus(&Counts { last_physical: 300, ..counts });
        assert_eq!((sum.counts.csum_errors, sum.counts.data_bytes_scrubbed, sum.counts.last_physical), (4, 20, 300));
    }
}
