//! The picture of a map: a strip for each device, broken into rows, and a bar for each of the files with most pieces.

use std::fmt::Write as _;

use ubtrfs_format::item::BlockGroupFlags;

use super::layout::{ExtentOfGroup, MappedDevice, SpaceMap};
use super::{kind_of, shown_file};
use crate::common::format_size;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 20.0;
const ROW: f64 = 26.0;
const GAP: f64 = 6.0;
const LINE: f64 = 18.0;
/// Rows of a device that has many block groups.
const ROWS_MAX: usize = 32;
/// Block groups in a row, so that each is wide enough to be seen.
const IN_ROW: usize = 24;

pub(super) fn draw(map: &SpaceMap, name: &str) -> String {
    let mut picture = Picture { body: String::new(), y: 28.0 };
    picture.text(LEFT, 15, &format!("{name}: block groups and their use"));
    picture.legend();
    for device in &map.devices {
        picture.device(device);
    }
    picture.files(map);
    let (width, height) = (WIDTH + 2.0 * LEFT, picture.y + GAP);
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0}' height='{height:.0}' font-family='sans-serif' \
         font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n{}</svg>\n",
        picture.body
    )
}

struct Picture {
    body: String,
    /// Where the next line begins.
    y: f64,
}

impl Picture {
    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "{text}");
    }

    fn text(&mut self, x: f64, size: u32, text: &str) {
        let (y, text) = (self.y, for_xml(text));
        self.put(format_args!("<text x='{x:.1}' y='{y:.1}' font-size='{size}'>{text}</text>"));
    }

    fn rect(&mut self, (x, y, width, height): (f64, f64, f64, f64), style: &str, title: &str) {
        let title = for_xml(title);
        self.put(format_args!(
            "<rect x='{x:.1}' y='{y:.1}' width='{width:.1}' height='{height:.1}' {style}><title>{title}</title></rect>"
        ));
    }

    fn legend(&mut self) {
        self.y += LINE;
        let mut x = LEFT;
        let kinds =
            [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM, BlockGroupFlags::empty()];
        for kind in kinds {
            let name = if kind.is_empty() { "unallocated" } else { kind_of(kind).0 };
            let (color, y) = (color(kind), self.y);
            self.rect((x, y - 10.0, 12.0, 12.0), &format!("fill='{color}' stroke='#999'"), name);
            self.text(x + 16.0, 12, name);
            x += 110.0;
        }
        self.text(x, 12, "the filled part of a block group is in use");
        self.y += LINE;
    }

    fn device(&mut self, device: &MappedDevice) {
        let end = device.extents.iter().map(|extent| extent.start.saturating_add(extent.len)).max();
        let size = device.size.max(end.unwrap_or_default()).max(1);
        let rows = device.extents.len().div_ceil(IN_ROW).clamp(1, ROWS_MAX);
        let in_row = size.div_ceil(rows as u64).max(1);
        self.y += LINE;
        self.text(LEFT, 13, &device.title());
        self.y += GAP;
        let top = self.y;
        let y_of = |row: u64| top + row as f64 * (ROW + GAP);
        for row in 0..rows as u64 {
            let len = in_row.min(size.saturating_sub(row * in_row));
            let width = WIDTH * len as f64 / in_row as f64;
            let style = format!("fill='{}' stroke='#999'", color(BlockGroupFlags::empty()));
            self.rect((LEFT, y_of(row), width, ROW), &style, "unallocated");
        }
        for extent in &device.extents {
            let title = title_of(extent);
            let (mut at, end) = (extent.start, extent.start.saturating_add(extent.len));
            while at < end {
                let row = at / in_row;
                let until = end.min((row + 1).saturating_mul(in_row));
                let x = LEFT + WIDTH * (at - row * in_row) as f64 / in_row as f64;
                let width = WIDTH * (until - at) as f64 / in_row as f64;
                let (y, used) = (y_of(row), ROW * extent.fill());
                let color = color(extent.flags);
                self.rect(
                    (x, y, width, ROW),
                    &format!("fill='{color}' fill-opacity='0.25' stroke='{color}' stroke-width='0.6'"),
                    &title,
                );
                self.rect((x, y + ROW - used, width, used), &format!("fill='{color}'"), &title);
                at = until;
            }
        }
        self.y = y_of(rows as u64) + GAP;
    }

    fn files(&mut self, map: &SpaceMap) {
        let Some(most) = map.files.first() else { return };
        self.y += LINE;
        self.text(LEFT, 13, "Files in most pieces");
        for file in &map.files {
            self.y += LINE;
            let width = 300.0 * file.counts.pieces as f64 / most.counts.pieces.max(1) as f64;
            let title = format!("{} extents, {}", file.counts.extents, format_size(file.counts.bytes));
            let y = self.y - 11.0;
            self.rect((LEFT, y, width.max(1.0), 13.0), "fill='#b2182b'", &title);
            let text = format!("{} pieces, {title}: {}", file.counts.pieces, shown_file(file));
            self.text(LEFT + 310.0, 12, &text);
        }
        self.y += LINE;
    }
}

fn title_of(extent: &ExtentOfGroup) -> String {
    let (kind, profile) = kind_of(extent.flags);
    let used = extent.used.map_or_else(|| "unknown".to_owned(), format_size);
    format!(
        "{kind}, {profile}: block group {}, {used} of {} in use; here from {} to {}",
        extent.logical,
        format_size(extent.group_len),
        extent.start,
        extent.start.saturating_add(extent.len)
    )
}

fn color(flags: BlockGroupFlags) -> &'static str {
    match flags.intersection(BlockGroupFlags::TYPES) {
        BlockGroupFlags::DATA => "#2166ac",
        BlockGroupFlags::METADATA => "#1b7837",
        BlockGroupFlags::SYSTEM => "#e08214",
        flags if flags.is_empty() => "#f4f4f4",
        _ => "#762a83",
    }
}

/// Text in which nothing is markup. Names are escaped for terminals already, so they have no control characters.
fn for_xml(text: &str) -> String {
    // XML has no such characters, not even as numbers.
    let text = text.replace(['\u{fffe}', '\u{ffff}'], "\u{fffd}");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&#39;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_that_xml_can_have() {
        assert_eq!(for_xml("<a&'\"\u{fffe}\u{ffff}>"), "&lt;a&amp;&#39;&quot;\u{fffd}\u{fffd}&gt;");
    }
}
