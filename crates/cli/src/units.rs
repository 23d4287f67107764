//! The options by which btrfs-progs chooses the unit of sizes.

/// The unit of printed sizes. As in btrfs-progs, `-h` of a command with these options asks for sizes, not for help.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Units {
    /// Print sizes in bytes
    #[arg(short = 'b', long, visible_alias = "bytes")]
    raw: bool,
    /// Print sizes in the largest unit that fits; the default
    #[arg(short = 'h', long, overrides_with = "raw")]
    human_readable: bool,
    /// Use 1024 as the base of units (KiB, MiB, GiB, TiB); the default
    #[arg(long, overrides_with = "si")]
    iec: bool,
    /// Use 1000 as the base of units (kB, MB, GB, TB)
    #[arg(short = 'H', long, overrides_with = "iec")]
    si: bool,
    /// Print sizes in KiB, or in kB with --si
    #[arg(long, group = "unit")]
    kbytes: bool,
    /// Print sizes in MiB, or in MB with --si
    #[arg(long, group = "unit")]
    mbytes: bool,
    /// Print sizes in GiB, or in GB with --si
    #[arg(long, group = "unit")]
    gbytes: bool,
    /// Print sizes in TiB, or in TB with --si
    #[arg(long, group = "unit")]
    tbytes: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// The short forms of options for a fixed unit, for commands in which these letters mean nothing else.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct UnitLetters {
    /// Short for --kbytes
    #[arg(short, group = "unit")]
    k: bool,
    /// Short for --mbytes
    #[arg(short, group = "unit")]
    m: bool,
    /// Short for --gbytes
    #[arg(short, group = "unit")]
    g: bool,
    /// Short for --tbytes
    #[arg(short, group = "unit")]
    t: bool,
}

impl Units {
    /// The default units, or with `raw` numbers of bytes.
    pub(crate) fn or_raw(raw: bool) -> Self {
        Self { raw, ..Self::default() }
    }

    /// Adds the units that were given as letters.
    pub(crate) fn with(self, letters: UnitLetters) -> Self {
        let UnitLetters { k, m, g, t } = letters;
        Self {
            kbytes: self.kbytes || k,
            mbytes: self.mbytes || m,
            gbytes: self.gbytes || g,
            tbytes: self.tbytes || t,
            ..self
        }
    }

    /// Formats a size as btrfs-progs does, such as `1.60GiB`.
    pub(crate) fn format(&self, bytes: u64) -> String {
        if self.raw {
            return bytes.to_string();
        }
        let (base, names) = if self.si { (1000, SI) } else { (1024, IEC) };
        let fixed = [self.kbytes, self.mbytes, self.gbytes, self.tbytes].iter().position(|is_asked| *is_asked);
        let unit = fixed.map_or_else(|| largest_unit(bytes, base, names.len()), |at| at + 1);
        if unit == 0 {
            return format!("{bytes}.00B");
        }
        // Divide in integers first, so that the result is cut off as in btrfs-progs.
        let last = (1..unit).fold(bytes, |rest, _| if fixed.is_none() { rest / base } else { rest });
        let divisor = if fixed.is_none() { base as f64 } else { (base as f64).powi(unit as i32) };
        format!("{:.2}{}", last as f64 / divisor, names[unit])
    }

    /// Whether no unit was chosen.
    pub(crate) fn is_default(&self) -> bool {
        let is_fixed = self.kbytes || self.mbytes || self.gbytes || self.tbytes;
        !(self.raw || self.si || is_fixed)
    }
}

/// Formats a size as `ls -h` does: rounded up, with two digits at least, such as `1.5M`.
pub(crate) fn short_size(bytes: u64) -> String {
    let unit = |unit: usize| 1_u128 << (10 * unit);
    for (index, name) in IEC.iter().enumerate() {
        let letter = if index == 0 { "" } else { &name[..1] };
        let tenths = (u128::from(bytes) * 10).div_ceil(unit(index));
        let whole = u128::from(bytes).div_ceil(unit(index));
        if index > 0 && tenths < 100 {
            return format!("{}.{}{letter}", tenths / 10, tenths % 10);
        }
        if whole < 1024 {
            return format!("{whole}{letter}");
        }
    }
    bytes.to_string()
}

/// The index of the largest unit in which the size is at least 1.
fn largest_unit(bytes: u64, base: u64, nr_units: usize) -> usize {
    let mut unit = 0;
    let mut rest = bytes;
    while rest >= base && unit + 1 < nr_units {
        rest /= base;
        unit += 1;
    }
    unit
}

const IEC: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const SI: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sizes_are_those_of_ls() {
        let sizes = [0, 1023, 1024, 1025, 10 << 10, (10 << 10) + 1, (1 << 20) - 1, 1 << 20, 1_500_000, u64::MAX];
        let shown = ["0", "1023", "1.0K", "1.1K", "10K", "11K", "1.0M", "1.0M", "1.5M", "16E"];
        assert_eq!(sizes.map(short_size), shown);
    }

    #[test]
    fn sizes_are_printed_as_by_btrfs_progs() {
        let of = |units: Units, bytes| units.format(bytes);
        let human = Units::default();
        assert_eq!(
            [0, 16384, 1 << 30, 1_717_986_918].map(|size| of(human, size)),
            ["0.00B", "16.00KiB", "1.00GiB", "1.60GiB"]
        );
        let si = Units { si: true, ..human };
        assert_eq!([0, 16384, 3_162_112].map(|size| of(si, size)), ["0.00B", "16.38kB", "3.16MB"]);
        assert_eq!(of(Units { kbytes: true, ..human }, 3_162_112), "3088.00KiB");
        assert_eq!(of(Units { mbytes: true, si: true, ..human }, 16384), "0.02MB");
        assert_eq!(of(Units { tbytes: true, ..human }, 16384), "0.00TiB");
        assert_eq!(of(Units { raw: true, ..human }, 16384), "16384");
    }
}
