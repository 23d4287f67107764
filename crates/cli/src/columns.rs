//! Tables of devices as btrfs-progs prints them.

/// Formats rows of cells, padded to the widths of their columns. A line of dashes goes before each part. Headings and the
/// second column, which has paths, are aligned left, everything else right.
pub(crate) fn columns(headings: &[Vec<String>], parts: &[Vec<Vec<String>>]) -> String {
    let rows = || headings.iter().chain(parts.iter().flatten());
    let nr_columns = rows().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..nr_columns).map(width).collect();
    let line = |row: &Vec<String>, is_heading: bool| {
        let pad = |(at, (cell, width)): (usize, (&String, &usize))| match is_heading || at == 1 {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        };
        row.iter().zip(&widths).enumerate().map(pad).collect::<Vec<_>>().join(" ") + "\n"
    };
    let rule = widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join(" ") + "\n";
    let mut text: String = headings.iter().map(|row| line(row, true)).collect();
    for part in parts {
        text.push_str(&rule);
        text.extend(part.iter().map(|row| line(row, false)));
    }
    text
}
