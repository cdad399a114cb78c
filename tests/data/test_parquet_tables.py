"""A damaged row group costs itself alone, and each of its rows is counted."""

import zlib
from base64 import b85decode

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import COMMON_COLUMNS, File, Pair, Problem
from fastclip.data.parquet_tables import DAMAGED_PAGE, DamagedParquet, open_parquet, read_column, read_parquet
from tests.data.collections import png

# Flipped bits in the metadata of a column, for which pyarrow ends the process: base85 of a compressed file
FATAL = (
    "c-"
    "oCq!EV|>5FIbBn*)jn(yqJ_ia0b@4^E1aKv9(()+o>_pc0e_CF&uLV>w8WP@sYK)I*Ow=FrdRp{IUP|Dl)8tT7<bNL_hnc6Vmpdz"
    "xLhRmbBd&+~i}9pnKF0Pt`E2Re4~IL9q+6{_&k@NC%H!WhG88b*d;bcgRWF(IuD$Xt^N5uwP7E(Vtfp=|_nhzuhb04u{XFM#MdG|"
    "A*O`6l0VIZI2~oE7I<<~HB{XXYYbzOR67jl<h$5O5QCb{Fhty+II1P+|7-Fc?mH_jd?kH4m|-"
    "V%lcEH=b}tshAM;qd{~x*@b2S!@`oTbR8)0tgL{QlXEN%!W1(xbE?k9O1Gq|1v65bLw6{cw4?(jLal%tq%t&hN{N`3cr@^Hei_ae"
    "W3`9tzzAzHS*M<o&TmYZ&IUSoLM{_$;>`KMoJU4|TL%PEs&DCklrnK8uAHwK=l7Fv2qx>vwS)L+2%<(0vS4Rbr}M7+I=LnLJ9|ar"
    "AXYd|RWeSLnkqk5b){le(;?;iO0{TFQ|hfgSbCK#{qbUd@|i$!aonow!ztNgm9qGn>J6ETa(#N!=s#S?wV0%o+h{2L^js%3)T*>O"
    "exqNy?3VQY6XnkoiA50?MAe#;rA5A<hzyr{_0ZCSu6KJ`K3|k1@uMTKi^E{_;bSz}3x~tKU^Kd)79XO~7;mIluI`uiJ?Y{*rKkD_"
    "TiwQA{4bAetcC"
)
ROWS, GROUP = 10, 4  # in groups of 4, 4 and 2 rows


def write(path, damaged_column=None):
    table = pa.table(
        {"image": [png(i) for i in range(ROWS)], "caption": [f"picture {i}" for i in range(ROWS)]}
    )
    pq.write_table(table, path, row_group_size=GROUP, use_dictionary=False)
    if damaged_column is not None:
        place = pq.ParquetFile(path).metadata.row_group(1).column(damaged_column).data_page_offset
        raw = bytearray(path.read_bytes())
        raw[place : place + 8] = b"\xff" * 8
        path.write_bytes(raw)
    return File(str(path), "table")


def test_a_damaged_group_of_captions_is_one_problem_of_all_its_rows(tmp_path):
    items = list(read_parquet(write(tmp_path / "t.parquet", 1), COMMON_COLUMNS))
    (problem,) = [item for item in items if isinstance(item, Problem)]
    assert (problem.reason, problem.pairs) == (DAMAGED_PAGE, GROUP)
    assert problem.place == "row group 1, column caption (rows 4 to 7)"
    assert [item.image for item in items if isinstance(item, Pair)] == [0, 1, 2, 3, 8, 9]


def test_a_damaged_group_of_images_is_read_once_and_fails_for_each_row(tmp_path, monkeypatch):
    manifest = open_manifest(write(tmp_path / "t.parquet", 0).path)
    assert len(manifest) == ROWS
    reads = []
    monkeypatch.setattr(
        "fastclip.data.readers.read_column",
        lambda table, group, column: reads.append(group) or read_column(table, group, column),
    )
    reader = manifest.reader()
    for row in range(4, 8):
        with pytest.raises(UnusableSample) as caught:
            reader.read(row)
        assert str(caught.value).startswith(f"{DAMAGED_PAGE} (row group 1, column image")
    assert reads == [1]
    assert [reader.read(row).image for row in (0, 9)] == [png(0), png(9)]


def test_errors_say_which_column_is_damaged(tmp_path):
    table = open_parquet(write(tmp_path / "t.parquet", 1).path)
    assert len(read_column(table, 1, "image")) == GROUP
    with pytest.raises(DamagedParquet) as caught:
        read_column(table, 1, "caption")
    assert caught.value.column == "caption"
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DamagedParquet):
        open_parquet(tmp_path / "t.parquet")


def test_metadata_for_which_pyarrow_ends_the_process_is_damage_of_the_group(tmp_path):
    (tmp_path / "t.parquet").write_bytes(zlib.decompress(b85decode(FATAL)))
    items = list(read_parquet(File(str(tmp_path / "t.parquet"), "table"), COMMON_COLUMNS))
    assert {item.reason for item in items} == {DAMAGED_PAGE}
    assert sum(item.pairs for item in items) == 3
